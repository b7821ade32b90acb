"""The package as it is installed: what importing it costs, what the wheel holds, what the repository names."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import cute_ssd

ROOT = Path(__file__).parent.parent


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_nothing_heavy() -> None:
    code = "import sys, time; t = time.process_time(); import cute_ssd; print(time.process_time() - t); "
    code += "print([m for m in ('torch', 'cutlass', 'numpy', 'nvtx', 'tqdm', 'transformers') if m in sys.modules])"
    seconds, loaded = python(code).splitlines()
    assert loaded == "[]" and float(seconds) < 0.2


def test_the_whole_api_loads_neither_cutlass_nor_cuda() -> None:
    code = "import sys, torch; before = set(sys.modules); from cute_ssd import *; import cute_ssd.compat; "
    code += "new = set(sys.modules) - before; "
    code += "print(torch.cuda.is_initialized(), [m for m in new if m.split('.')[0] in ('cutlass', 'transformers')])"
    assert python(code) == "False []"


def test_a_scan_loads_neither_cutlass_nor_cuda() -> None:
    code = "import sys, torch, cute_ssd; x = torch.randn(1, 3, 2, 4); B = torch.randn(1, 3, 1, 4); "
    code += "cute_ssd.ssd_chunk_scan(x, -torch.rand(1, 2, 3), B, B); "
    code += "print(torch.cuda.is_initialized(), 'cutlass' in sys.modules)"
    assert python(code) == "False False"


def test_public_names() -> None:
    assert set(cute_ssd.__all__) <= set(dir(cute_ssd))
    for name in cute_ssd.__all__:
        assert getattr(cute_ssd, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'scan'; public names are"):
        _ = cute_ssd.scan


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a copy of the sources, so that building leaves nothing among them."""
    pytest.importorskip("setuptools", minversion="77")
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "cute_ssd", copy / "cute_ssd", ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        "out",
    ]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (copy / "out").glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_the_package_and_its_data(wheel: zipfile.ZipFile) -> None:
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "cute_ssd").rglob("*.py")}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    kinds = (
        "data/*.json",
        "*/README.md",
        "emulator/timing/README.md",
        "emulator/timing/b200/*",
        "emulator/shim.c",
        "emulator/engine/*.cpp",
        "emulator/engine/*.h",
    )
    data = {str(p.relative_to(ROOT)) for kind in kinds for p in (ROOT / "cute_ssd").glob(kind)}
    assert {"cute_ssd/data/sol_suite.json", "cute_ssd/emulator/README.md"} < data and len(data) > 30
    assert packed == sources | data | {"cute_ssd/py.typed"}
    assert any(name.endswith("LICENSE") for name in wheel.namelist())


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    info = f"cute_ssd-{cute_ssd.__version__}.dist-info"
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert f"Version: {cute_ssd.__version__}\n" in metadata and "License-Expression: Apache-2.0\n" in metadata
    assert "Requires-Dist: nvidia-cutlass-dsl<4.9,>=4.8.1\n" in metadata
    assert 'Requires-Dist: nvidia-cutlass-dsl[cu13]<4.9,>=4.8.1; extra == "cu13"\n' in metadata
    assert set(re.findall(r"Provides-Extra: (\w+)", metadata)) == {"cu13", "test", "profiling", "dev"}
    assert "cute-ssd = cute_ssd.__main__:main" in wheel.read(f"{info}/entry_points.txt").decode()


def test_the_changelog_knows_this_version() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None and newest[1] == cute_ssd.__version__


def test_the_repository_names_no_machine_and_no_registry() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    hosts = {"www.apache.org", "arxiv.org", "github.com"}
    for name in listed.stdout.splitlines():
        if not (ROOT / name).is_file():
            continue
        text = (ROOT / name).read_text(errors="replace")
        assert not re.search(r"(?<![\w.])/(?:work|root|home|mnt|Users)/\w", text), name
        assert not re.search(r"index-url|find-links|trusted-host", text) or name.endswith("test_package.py"), name
        found = set(re.findall(r"https?://([\w.-]+)", text))
        assert found <= hosts, f"{name} names {found - hosts}"
