//! Proves that the Vulkan validation layers watch the tests, where `scripts/test.sh` switches them on.

use wgpu::hal::{self, Device as _};

/// Breaks a rule of Vulkan on purpose (a buffer without a use), which only the validation layers notice.
#[test]
#[ignore = "provokes a validation message; scripts/test.sh runs it by name and expects the message"]
fn a_broken_rule_is_reported() {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle().with_env());
    let adapter =
        pollster::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default())).expect("an adapter");
    let info = adapter.get_info();
    println!("adapter: {} ({} {})", info.name, info.driver, info.driver_info);
    let (device, _queue) =
        pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor::default())).expect("a device");
    // SAFETY: the buffer is not used, and it is destroyed on the device that made it. Its creation breaks a rule of
    // Vulkan that drivers are known to tolerate; that is the point.
    unsafe {
        let Some(raw) = device.as_hal::<hal::api::Vulkan>() else {
            println!("not a Vulkan device: nothing to provoke");
            return;
        };
        let buffer = raw
            .create_buffer(&hal::BufferDescriptor {
                label: None,
                size: 16,
                usage: wgpu::BufferUses::empty(),
                memory_flags: hal::MemoryFlags::empty(),
            })
            .expect("the driver tolerates a buffer without a use");
        raw.destroy_buffer(buffer);
    }
}
