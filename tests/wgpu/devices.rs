//! Devices to test on.

use std::sync::LazyLock;

use kvpack::wgpu::{Path, Requirements, Tensor, Wgpu, choose_adapter, open_device};

/// The path that `KVPACK_PATH` names, or the best.
pub fn path() -> Path {
    std::env::var("KVPACK_PATH").map_or(Path::Subgroups, |path| path.parse().unwrap())
}

/// One device for all tests that do not harm it.
pub fn shared() -> Wgpu {
    static SHARED: LazyLock<Wgpu> = LazyLock::new(fresh);
    SHARED.clone()
}

/// A device of its own, which lacks the features that the path forbids.
pub fn fresh() -> Wgpu {
    pollster::block_on(async {
        let adapter = choose_adapter(None).await.unwrap();
        let requirements = Requirements::of(&adapter).restricted_to(path());
        let (device, queue) = open_device(&adapter, requirements).await.unwrap();
        Wgpu::new(device, queue).unwrap().restricted_to(path())
    })
}

/// The words of a buffer.
pub fn words(backend: &Wgpu, buffer: &wgpu::Buffer) -> Vec<u32> {
    let count = buffer.size() as usize / 4;
    let tensor = Tensor::from_buffer(buffer.clone(), 0, count, kvpack::plan::ElementType::F32).unwrap();
    let floats = pollster::block_on(tensor.download(backend.device(), backend.queue())).unwrap();
    floats.into_iter().map(f32::to_bits).collect()
}
