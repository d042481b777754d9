#!/usr/bin/env python3
"""Exchanges quantised checkpoints with the packages that define their formats: gptqmodel, autoawq and
compressed-tensors, on the CPU.

    reference-checkpoints.py write FOLDER    writes FOLDER/theirs: a layer in every format that a package can pack
    reference-checkpoints.py check FOLDER    unpacks FOLDER/ours by the packages and compares the weights bit for bit

The other side are two tests of kvpack-weights:

    KVPACK_REFERENCE_FOLDER=FOLDER cargo test -p kvpack-weights --test weights -- --ignored references

The packages need not be installed: their unpacked archives on PYTHONPATH, and what they import, suffice.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

N, K, GROUP = 256, 512, 128


def random_layer(bits, symmetric=False, seed=0):
    """Codes [N, K], scales [N, K / GROUP] and zeros, and the weights that they stand for, f16."""
    random = torch.Generator().manual_seed(seed + bits)
    codes = torch.randint(0, 2**bits, (N, K), generator=random)
    scales = (torch.rand((N, K // GROUP), generator=random) + 0.01).half()
    # A zero of 0 would be stored as all ones in version 1 of GPTQ, which readers disagree about.
    zeros = torch.randint(1, 2**bits, (N, K // GROUP), generator=random)
    if symmetric:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    of_group = torch.arange(K) // GROUP
    weights = (codes - zeros[:, of_group]).half() * scales[:, of_group]
    return codes, scales, zeros, weights


def linear_of(weights):
    linear = torch.nn.Linear(K, N, bias=False, dtype=torch.float16)
    linear.weight.data = weights.clone()
    return linear


def save(folder, tensors, configuration, weights):
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"layer.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"quantization_config": configuration}))
    (folder / "expected.f16").write_bytes(weights.contiguous().numpy().tobytes())


def gptq_module(bits, act_order):
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.config import FORMAT

    return TorchLinear(
        bits=bits, group_size=GROUP, sym=False, desc_act=act_order, in_features=K, out_features=N,
        bias=False, register_buffers=True, format=FORMAT.GPTQ_V2,
    )


def write_gptq(folder):
    for bits in (2, 3, 4, 8):
        _, scales, zeros, weights = random_layer(bits)
        module = gptq_module(bits, False)
        index = (torch.arange(K) // GROUP).int()
        module.pack_original(linear_of(weights), scales, zeros, index)
        tensors = {name: getattr(module, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
        configuration = {
            "quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": bits, "group_size": GROUP,
            "desc_act": False, "sym": False,
        }
        save(folder / f"gptqmodel-{bits}", tensors, configuration, weights)


def write_awq(folder):
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.modules.linear.gemv import WQLinear_GEMV
    from awq.modules.linear.gemv_fast import WQLinear_GEMVFast

    modules = {"gemm": WQLinear_GEMM, "gemv": WQLinear_GEMV, "gemv_fast": WQLinear_GEMVFast}
    for version, module in modules.items():
        _, scales, zeros, weights = random_layer(4, seed=1)
        # gemm wants scales and zeros as [group, output].
        across = (scales.t(), zeros.t()) if version == "gemm" else (scales, zeros)
        scales, zeros = (tensor.contiguous() for tensor in across)
        packed = module.from_linear(linear_of(weights), 4, GROUP, scales=scales, zeros=zeros)
        configuration = {"quant_method": "awq", "version": version, "bits": 4, "group_size": GROUP, "zero_point": True}
        save(folder / f"autoawq-{version}", dict(packed.named_buffers()), configuration, weights)


def write_compressed_tensors(folder):
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    for bits in (2, 3, 4, 8):
        for symmetric in (True, False):
            _, scales, zeros, weights = random_layer(bits, symmetric, seed=2)
            weights_of = {
                "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": GROUP,
            }
            scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights_of))
            state = {"weight": weights.float(), "weight_scale": scales.float()}
            if not symmetric:
                state["weight_zero_point"] = (zeros - 2 ** (bits - 1)).to(torch.int8)
            packed = PackedQuantizationCompressor.compress(state, scheme)
            packed["weight_scale"] = scales
            configuration = {
                "quant_method": "compressed-tensors", "format": "pack-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights_of}},
            }
            name = f"compressed-tensors-{bits}-{'symmetric' if symmetric else 'asymmetric'}"
            save(folder / name, packed, configuration, weights)


def unpacked(folder, configuration, tensors):
    """The weights [N, K] of a layer of ours, as the package of its format has them."""
    if configuration["quant_method"] == "awq":
        from awq.utils.packing_utils import dequantize_gemm

        return dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"], 4, GROUP).t()
    module = gptq_module(configuration["bits"], configuration["desc_act"])
    for name, tensor in tensors.items():
        assert getattr(module, name).shape == tensor.shape, (folder, name, getattr(module, name).shape, tensor.shape)
        getattr(module, name).copy_(tensor)
    module.post_init()
    return module.dequantize_weight().t()


def check(folder):
    checked = 0
    for checkpoint in sorted((folder / "ours").iterdir()):
        configuration = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
        stored = load_file(checkpoint / "model.safetensors")
        tensors = {name.removeprefix("layer."): tensor for name, tensor in stored.items()}
        given = unpacked(checkpoint, configuration, tensors).half().contiguous()
        expected = torch.frombuffer(bytearray((checkpoint / "expected.f16").read_bytes()), dtype=torch.float16)
        differ = int((given.flatten() != expected).sum())
        print(f"{checkpoint.name}: {differ} of {expected.numel()} weights differ")
        if differ:
            sys.exit(1)
        checked += 1
    assert checked, "no checkpoint was checked"


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in ("write", "check"):
        sys.exit(__doc__)
    folder = Path(sys.argv[2])
    if sys.argv[1] == "check":
        check(folder)
        return
    write_gptq(folder / "theirs")
    write_awq(folder / "theirs")
    write_compressed_tensors(folder / "theirs")


main()
