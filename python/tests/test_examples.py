"""The examples that need NumPy alone."""

import pathlib
import runpy

import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("name", ["press.py", "serving.py"])
def test_an_example_runs(name):
    runpy.run_path(str(FOLDER / name), run_name="__main__")
