"""Functions that run right after the import of a module, in a fresh process without verl."""

import os
import subprocess
import sys
import textwrap

MODULES = {
    "pack/__init__.py": "import pack_hook\npack_hook.given()\n",
    "pack/part.py": "from pack import inner\nVALUE = inner.VALUE\n",
    "pack/inner.py": "VALUE = 7\n",
    "broken.py": "import not_there_at_all\n",
    "flaky.py": "import pack_hook\npack_hook.tries += 1\nif pack_hook.tries == 1:\n    raise ValueError('first')\n",
    "pack_hook.py": """
        from metronome_patches.imports import on_import
        seen, tries = [], 0
        def given():
            on_import("pack.part", lambda module: seen.append(("part", module.VALUE)))
            on_import("pack.part", lambda module: seen.append("second"))
            on_import("pack.part", nested)
            on_import("pack.inner", lambda module: seen.append(("inner", module.VALUE)))
        def nested(module):
            import pack.part as part
            assert part is module
            on_import("pack.part", lambda module: seen.append("nested"))
            on_import("pack.inner", lambda module: seen.append("now"))
    """,
}
START = """
    import inspect, sys
    import pack_hook
    from pack_hook import on_import, seen
    from metronome.errors import PluginError
"""
ORDER = """
    import pack
    assert "pack.part" not in sys.modules and seen == []
    import pack.part
    assert seen == [("inner", 7), ("part", 7), "second", "now", "nested"], seen
    on_import("pack.part", lambda module: seen.append("late"))
    assert seen[-1] == "late"
    # The module's own loader stands again, so tools that read sources find them.
    assert type(pack.part.__loader__).__name__ == "SourceFileLoader"
    assert pack.part.__spec__.loader is pack.part.__loader__ and "VALUE" in inspect.getsource(pack.part)
    assert "torch" not in sys.modules and "verl" not in sys.modules
"""
ERRORS = """
    on_import("broken", lambda module: seen.append("never"))
    on_import("absent", lambda module: seen.append("never"))
    for name, missing in (("broken", "not_there_at_all"), ("absent", "absent")):
        try:
            __import__(name)
        except ModuleNotFoundError as error:
            assert error.name == missing
        else:
            raise AssertionError(name)
    on_import("flaky", lambda module: seen.append("flaky"))
    try:
        import flaky
    except ValueError as error:
        assert str(error) == "first"
    assert seen == []
    import flaky
    assert seen == ["flaky"]
"""
REFUSALS = """
    calls = []
    def refuses(module):
        calls.append(module)
        raise RuntimeError("refused")
    on_import("wave", refuses)
    for _ in range(2):
        try:
            import wave
        except RuntimeError as error:
            assert str(error) == "refused"
        else:
            raise AssertionError("an import with an error of ours went through")
    assert len(calls) == 2 and "wave" not in sys.modules
    halfway = sys.modules["halfway"] = type(sys)("halfway")
    halfway.__spec__ = type("Spec", (), {"_initializing": True})()
    try:
        on_import("halfway", print)
    except PluginError as error:
        assert "middle of its own import" in str(error)
    else:
        raise AssertionError("half imported")
"""


def passes(tmp_path, script):
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    paths = os.pathsep.join([str(tmp_path), *[path for path in sys.path if path]])
    code = textwrap.dedent(START) + textwrap.dedent(script) + "print('checked')\n"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.stdout.strip() == "checked", run.stderr


def test_functions_run_in_order_right_after_the_import_they_wait_for(tmp_path):
    passes(tmp_path, ORDER)


def test_an_import_that_fails_keeps_its_own_error_and_may_be_tried_again(tmp_path):
    passes(tmp_path, ERRORS)


def test_a_function_that_raises_fails_the_import_each_time(tmp_path):
    passes(tmp_path, REFUSALS)
