"""The program of the README."""

import pathlib
import re


def test_the_program_runs():
    text = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(program, {})
