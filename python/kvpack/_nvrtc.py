"""Finds NVRTC, the compiler of CUDA's kernels, where PyTorch's wheels bring it."""

import ctypes
import importlib.util
import pathlib

_loaded: list[tuple[ctypes.CDLL, str]] = []


def candidates() -> list[pathlib.Path]:
    """Files of NVRTC in the packages ``nvidia-cuda-nvrtc`` and ``nvidia-cuda-nvrtc-cu12``, the newest first."""
    try:
        found = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return []
    folders = [pathlib.Path(folder) for folder in (found.submodule_search_locations or [])] if found else []
    files = [file for folder in folders for file in folder.glob("*/lib/libnvrtc.so.*") if "alt" not in file.name]
    return sorted(files, key=lambda file: file.name, reverse=True)


def load() -> str | None:
    """Loads the first that can be: the loader then finds it by its name, before that of the system. Returns it."""
    for file in [] if _loaded else candidates():
        try:
            _loaded.append((ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL), str(file)))
            break
        except OSError:
            continue
    return _loaded[0][1] if _loaded else None
