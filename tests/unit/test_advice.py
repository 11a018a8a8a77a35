"""The lines that mend an environment, which errors and the doctor share."""

import sys
import tomllib
from pathlib import Path

import pytest

from omnicache_cli import advice
from omnicache_cli.engine.options import engine_args_class, told
from omnicache_cli.errors import EngineMissingError

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

NMS = "operator torchvision::nms does not exist"


@pytest.fixture
def with_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "find_spec", lambda name: name)


@pytest.fixture
def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "find_spec", lambda _: None)


def test_extras_are_those_of_the_package() -> None:
    ours = {name: list(packages) for name, packages in advice.EXTRAS.items()}
    extras = PROJECT["optional-dependencies"]
    assert ours == {name: extras[name] for name in extras.keys() - {"cuda", "omni", "dev"}}
    assert extras["cuda"] == [f"vllm=={advice.VLLM_VERSION}.*"]
    assert extras["omni"] == [f"vllm-omni=={advice.VLLM_VERSION}.*"]


def test_the_line_for_a_cpu_is_that_of_the_documentation() -> None:
    line = advice.VLLM_FOR_CPU.partition(": ")[2]
    assert line in (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    assert (ROOT / "requirements" / "cpu-overrides.txt").exists()


def test_the_known_pair_is_the_pinned_one() -> None:
    pins = (ROOT / "requirements" / "cpu-overrides.txt").read_text(encoding="utf-8")
    torch, torchvision = advice.KNOWN_PAIR
    assert f"torch==={torch}\ntorchvision==={torchvision}\n" in pins


@pytest.mark.usefixtures("with_pip")
def test_a_line_quotes_what_a_shell_would_act_on() -> None:
    assert advice.install("soundfile") == "pip install soundfile"
    assert advice.install_extra("profile") == "pip install 'py-spy>=0.4' 'psutil>=5.9'"


@pytest.mark.usefixtures("without_pip")
def test_an_environment_without_pip_gets_lines_for_uv() -> None:
    assert advice.install("soundfile") == "uv pip install soundfile"
    assert advice.uninstall("torchcodec") == "uv pip uninstall torchcodec"
    assert advice.install_torchvision("2.13.0") == (
        "uv pip install --reinstall-package torchvision --no-deps 'torchvision===0.28.0'"
    )


@pytest.mark.usefixtures("with_pip")
@pytest.mark.parametrize(
    ("torch", "line"),
    [
        ("2.13.0", "pip install --force-reinstall --no-deps 'torchvision===0.28.0'"),
        ("2.13.0+cu130", "pip install --force-reinstall --no-deps 'torchvision===0.28.0'"),
        ("2.12.1", "pip install --force-reinstall --no-deps 'torchvision==0.27.*'"),
        (
            "2.13.0+cpu",
            "uv pip install --torch-backend=cpu --reinstall-package torchvision "
            "'torchvision==0.28.*'",
        ),
        ("3.0.0", "pip install torchvision"),
        (None, "pip install torchvision"),
    ],
)
def test_torchvision_is_the_one_for_this_torch(torch: str | None, line: str) -> None:
    assert advice.install_torchvision(torch) == line


def test_vllm_is_the_one_for_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(advice, "NVIDIA_DRIVER", tmp_path / "version")
    assert advice.install_vllm() == advice.VLLM_FOR_CPU
    (tmp_path / "version").touch()
    assert advice.install_vllm().endswith("pip install 'vllm==0.30.*'")
    assert advice.install_vllm(has_gpu=False) == advice.VLLM_FOR_CPU


@pytest.mark.parametrize(
    ("cpus", "binding"),
    [({0, 1}, "0|1"), ({4, 2, 3}, "2|3,4"), ({0, 1, 2, 3}, "0,1|2,3"), ({7}, "7|7")],
)
def test_two_ranks_share_the_cpus(cpus: set[int], binding: str) -> None:
    line = f'export VLLM_CPU_OMP_THREADS_BIND="{binding}"'
    assert advice.bind_two_ranks(frozenset(cpus)) == line


@pytest.mark.parametrize(
    ("scope", "in_container", "line"),
    [
        (1, True, "docker run --cap-add SYS_PTRACE, or in Kubernetes "),
        (1, False, "sudo sysctl kernel.yama.ptrace_scope=0"),
        (3, False, "kernel.yama.ptrace_scope is 3, which only a reboot lowers; run as root"),
        (None, False, 'run it as root: sudo env "PATH=$PATH" omnicache profile ...'),
        (0, False, 'run it as root: sudo env "PATH=$PATH" omnicache profile ...'),
    ],
)
def test_what_allows_py_spy_to_read(scope: int | None, in_container: bool, line: str) -> None:
    assert advice.allow_ptrace(scope, in_container=in_container).startswith(line)


@pytest.mark.usefixtures("with_pip")
@pytest.mark.parametrize(
    ("message", "mend"),
    [
        (NMS, advice.install_torchvision),
        ("libtorchcodec.so: undefined symbol: x", "pip uninstall -y torchaudio torchcodec"),
        ("libcudart.so.12: cannot open shared object file", advice.VLLM_FOR_CPU),
        ("Failed to infer device type", advice.VLLM_FOR_CPU),
        ("Not enough allowed NUMA nodes to bind", "export VLLM_CPU_OMP_THREADS_BIND="),
        ("No common block size for 48", "try another --block-size, on a CPU a multiple of 32"),
        ("[Errno 28] No space left on device", "free some space"),
        ("something else", None),
    ],
)
def test_an_error_that_is_known_has_its_line(message: str, mend: object) -> None:
    if mend is advice.install_torchvision:
        mend = advice.install_torchvision(advice.installed("torch"))
    found = advice.mend_for(message)
    assert found == mend if mend is None else (found or "").startswith(str(mend))
    assert told(RuntimeError(f"{message}.\nmore")) == (
        f"{message}." if found is None else f"{message}; {found}"
    )


def test_the_cause_of_an_error_counts_too() -> None:
    error = ImportError("Could not import module 'Qwen3ForCausalLM'")
    error.__cause__ = RuntimeError(NMS)
    assert advice.mend_for(error) == advice.mend_for(NMS)


# -- errors end with the same line ------------------------------------------------------------


def broken_vllm(folder: Path, statement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `vllm` that ends its import with this statement."""
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text(statement, encoding="utf-8")
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (
            f"raise RuntimeError({NMS!r})",
            f"vLLM does not import: {NMS}; {advice.mend_for(NMS)}",
        ),
        (
            "raise OSError('libtorchcodec_core7.so: cannot open shared object file')",
            "vLLM does not import: libtorchcodec_core7.so: cannot open shared object file; "
            f"{advice.mend_for('torchcodec')}",
        ),
        ("import is_not_there", "No module named 'is_not_there'; omnicache doctor says what"),
    ],
)
def test_a_vllm_that_does_not_import_says_what_mends_it(
    statement: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_vllm(tmp_path, statement, monkeypatch)
    with pytest.raises(EngineMissingError) as caught:
        engine_args_class()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


class Without:
    """A finder that comes first and knows of no vllm."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "vllm":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_a_missing_vllm_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Without(), *sys.meta_path])
    with pytest.raises(EngineMissingError) as caught:
        engine_args_class()
    assert str(caught.value) == f"vLLM is not installed; {advice.install_vllm()}"
