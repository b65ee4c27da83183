"""Selection of back-ends: the choice, the messages and the refusals."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import sys
import types
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from frontier_llm.config import load_run
from frontier_llm.config.schema import OpsConfig
from frontier_llm.errors import BackendError
from frontier_llm.ops import AttentionNeeds, Scores, native, providers, reference, sdpa, select, select_ops
from frontier_llm.ops.gpu import GpuOps
from frontier_llm.ops.reference import GROUPS, Ops
from frontier_llm.ops.select import backends
from frontier_llm.training.guard.provenance import provenance


@pytest.fixture
def without_cpu_library(monkeypatch):
    broken = providers.PROVIDERS["cpu"].__class__(
        **{**vars(providers.PROVIDERS["cpu"]), "missing": lambda: "libfrontier_ops.so has not been built"}
    )
    monkeypatch.setitem(providers.PROVIDERS, "cpu", broken)


def test_every_op_of_the_face_belongs_to_one_group_and_has_a_reference():
    grouped = [op for ops in GROUPS.values() for op in ops]
    assert sorted(grouped) == sorted(name for name, value in vars(Ops).items() if isinstance(value, staticmethod))
    assert all(getattr(Ops, op) is getattr(reference, op) for op in grouped)
    with pytest.raises(TypeError, match="one function for each op"):
        Ops(rms_norm=reference.rms_norm)


def test_fp64_is_always_the_reference(capsys):
    ops = select_ops(OpsConfig(), "cpu", torch.float64)
    assert all(getattr(ops, op) is getattr(reference, op) for op in vars(ops))
    (line,) = capsys.readouterr().err.splitlines()
    assert "reference (torch" in line and all(group in line for group in GROUPS)


@pytest.mark.skipif(bool(native.load_cpu_library()), reason="the C++ ops are not built")
def test_auto_takes_the_cpp_ops_on_cpu(capsys):
    ops = select_ops(OpsConfig(), "cpu", torch.bfloat16)
    assert type(ops.attention.__self__).__module__ == "frontier_llm.ops.cpu"
    said = capsys.readouterr().err
    assert f"cpu (C++, {torch.ops.frontier_llm.instruction_set()}): auto" in said and "attention" in said


def test_without_the_library_auto_says_how_to_build_it(without_cpu_library, capsys):
    ops = select_ops(OpsConfig(), "cpu", torch.float32)
    assert ops.attention is sdpa.attention and ops.rms_norm is reference.rms_norm
    said = capsys.readouterr().err
    reason = "not used: cpu (libfrontier_ops.so has not been built; build: scripts/build_native.sh"
    assert all(reason in line for line in said.splitlines()) and all(group in said for group in GROUPS)


def test_every_missing_explicit_choice_is_named_at_once_with_its_build(without_cpu_library):
    with pytest.raises(BackendError) as caught:
        select_ops(OpsConfig(attention="flash_attn", norm="cpu", rope="triton"), "cpu", torch.bfloat16)
    text = str(caught.value)
    assert "ops.attention=flash_attn" in text and "flash_attn does not run on cpu" in text
    assert "ops.norm=cpu" in text and "scripts/build_native.sh" in text
    assert "ops.rope=triton" in text
    assert len(caught.value.problems) == 3


def test_a_type_that_the_back_end_lacks_is_refused():
    with pytest.raises(BackendError, match="cpu has no float16 attention"):
        select_ops(OpsConfig(attention="cpu"), "cpu", torch.float16)
    outcome = select.choose("attention", "triton", select.Conditions("cuda", torch.float32))
    assert "triton has no float32 attention" in str(outcome)


@pytest.mark.parametrize(
    ("group", "backend", "script"),
    [
        ("attention", "flash_attn", "scripts/build_flash_attn_rocm.sh"),
        ("norm", "apex", "scripts/build_apex_rocm.sh"),
        ("adamw", "apex", "scripts/build_apex_rocm.sh"),
    ],
)
def test_a_missing_package_names_the_script_that_builds_it(group, backend, script, monkeypatch):
    monkeypatch.setattr(providers.importlib.util, "find_spec", lambda name: None)
    outcome = select.choose(group, backend, select.Conditions("cuda", torch.bfloat16))
    assert f"ops.{group}={backend}" in str(outcome) and "not installed" in str(outcome) and script in str(outcome)
    assert (Path(__file__).resolve().parents[3] / script).is_file()


def test_a_back_end_whose_parameters_differ_from_the_face_is_refused():
    def right(x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def another_order(x: Tensor, eps: float, weight: Tensor) -> Tensor: ...
    def too_few(x: Tensor, weight: Tensor) -> Tensor: ...
    def another_type(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor: ...
    def another_default(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor: ...

    assert set(providers.functions_of(types.SimpleNamespace(rms_norm=right))) == {"rms_norm"}
    for wrong in (another_order, too_few, another_type, another_default):
        with pytest.raises(
            TypeError, match=r"rms_norm\(.*differs from .* reference, \(x: 'Tensor', weight: 'Tensor', eps: 'float'\)"
        ):
            providers.functions_of(types.SimpleNamespace(rms_norm=wrong))


@pytest.mark.parametrize("name", sorted(providers.PROVIDERS))
def test_every_back_end_has_the_parameters_of_the_face(name):
    """Registration checks this. The test also covers back-ends whose packages or devices are missing."""
    if name == "triton":
        implementation = GpuOps(None)
    elif name == "cpu":
        implementation = pytest.importorskip("frontier_llm.ops.cpu").CpuOps()
    else:
        module = {
            "flash_attn": "flash_attn_provider",
            "cudnn": "cudnn_provider",
            "apex": "apex_provider",
            "torch": "torch_linear",
        }.get(name, name)
        implementation = importlib.import_module(f"frontier_llm.ops.{module}")
    functions = providers.functions_of(implementation)
    provider = providers.PROVIDERS[name]
    wanted = {op for group in provider.groups for op in GROUPS[group]}
    assert (wanted if provider.parts else wanted - providers.PARTS) <= set(functions)


def test_stretches_on_a_gpu_have_kernels_and_are_never_silently_squares_of_scores(monkeypatch):
    for name in ("flash_attn", "triton"):
        monkeypatch.setitem(
            providers.PROVIDERS, name, dataclasses.replace(providers.PROVIDERS[name], missing=lambda: "")
        )

    def chosen(wanted="auto", dtype=torch.bfloat16, allow_fallback=False, **masks):
        needs = AttentionNeeds(parts=True, **masks)
        return select.choose("attention", wanted, select.Conditions("cuda", dtype, needs, allow_fallback))

    for masks in (
        {},
        {"documents": True},
        {"alibi": True},
        {"documents": True, "alibi": True, "window": True, "softcap": True},
    ):
        assert chosen(**masks).provider.name == "triton"
    for mask, name in {"documents": "document masks", "alibi": "ALiBi", "window": "a sliding window"}.items():
        assert f"torch's flash kernels do not support {name}" in chosen("sdpa", **{mask: True}).what
    outcome = chosen(window=True)
    assert (
        outcome.where == "ops.attention=auto"
        and "triton does not support a sliding window" in outcome.what
        and "=heads" in outcome.fix
    )
    assert chosen(allow_fallback=True, window=True).provider.name == "reference"
    assert "do not support float32 on a GPU" in chosen(dtype=torch.float32).what
    monkeypatch.setattr(sdpa, "blocks_missing", lambda: "torch's flash attention does not run on this GPU")
    assert "does not run on this GPU" in chosen("sdpa").what


def test_softly_capped_scores_have_kernels_and_are_never_silently_squares_of_scores_on_a_gpu(monkeypatch):
    for name in ("flash_attn", "triton"):
        monkeypatch.setitem(
            providers.PROVIDERS, name, dataclasses.replace(providers.PROVIDERS[name], missing=lambda: "")
        )
    needs = AttentionNeeds(softcap=True, window=True)
    chosen = {
        (device, dtype): select.choose("attention", "auto", select.Conditions(device, dtype, needs))
        for device in ("cpu", "cuda")
        for dtype in (torch.bfloat16, torch.float32)
    }
    assert {chosen["cpu", dtype].provider.name for dtype in (torch.bfloat16, torch.float32)} == {"cpu"}
    assert chosen["cuda", torch.bfloat16].provider.name == "triton"
    assert "triton has no float32 attention" in chosen["cuda", torch.float32].what
    assert chosen["cuda", torch.float32].fix.startswith("set precision.dtype=bf16, or ")
    assert (
        "does not support a sliding window"
        in select.choose(
            "attention", "triton", select.Conditions("cuda", torch.bfloat16, AttentionNeeds(window=True))
        ).what
    )
    with pytest.raises(BackendError, match="sdpa does not support a soft cap of attention's scores"):
        select_ops(OpsConfig(attention="sdpa"), "cpu", torch.float32, needs)


def test_attention_over_parts_of_a_sequence_is_refused_where_it_is_not_there():
    with pytest.raises(
        BackendError,
        match=r"sdpa does not support attention over part of a sequence .* do not support document masks or ALiBi",
    ):
        select_ops(
            OpsConfig(attention="sdpa"), "cpu", torch.float32, AttentionNeeds(documents=True, parts=True, alibi=True)
        )
    with pytest.raises(BackendError, match="cudnn does not run on cpu"):
        select_ops(OpsConfig(attention="cudnn"), "cpu", torch.bfloat16, AttentionNeeds(parts=True))
    assert (
        "needs each row's log-sum-exp"
        in select.choose(
            "attention", "flash_attn", select.Conditions("cuda", torch.bfloat16, AttentionNeeds(parts=True))
        ).what
    )
    assert (
        select_ops(OpsConfig(), "cpu", torch.float64, AttentionNeeds(parts=True)).attention_block
        is reference.attention_block
    )


def test_fp16_on_the_cpu_is_plain_torch_and_listed_so():
    for row in backends("fp16"):
        if row["device"] == "cpu" and row["backend"] == "cpu":
            assert row["status"].startswith("no: cpu has no float16")
    chosen = {row["op"]: row["backend"] for row in backends("fp16") if row["device"] == "cpu" and row["chosen"]}
    assert chosen == {group: "sdpa" if group == "attention" else "reference" for group in GROUPS}


def test_triton_without_a_gpu_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    outcome = select.choose("norm", "triton", select.Conditions("cuda", torch.bfloat16))
    assert "torch sees no GPU" in str(outcome) and "build_ops --arch" in str(outcome)


@pytest.mark.parametrize("group", GROUPS)
def test_a_choice_on_gpu_always_ends_somewhere(group):
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        outcome = select.choose(group, "auto", select.Conditions("cuda", dtype, allow_fallback=True))
        assert isinstance(outcome, select.ChosenBackend)


def missing_kernels(monkeypatch, why):
    def none():
        raise BackendError(why, "python setup.py build_ops --arch sm_90")

    monkeypatch.setattr(providers, "kernels_of_this_gpu", none)


@pytest.mark.parametrize(
    "why", ["no manifest.json", "built from other versions of the kernel sources", "the driver refuses the code object"]
)
def test_auto_does_not_go_on_without_the_kernels_of_a_gpu(monkeypatch, why):
    missing_kernels(monkeypatch, why)
    with pytest.raises(BackendError) as error:
        select_ops(OpsConfig(attention="sdpa", norm="reference"), "cuda", torch.bfloat16)
    text = str(error.value)
    assert why in text and "build_ops --arch sm_90" in text and "ops.allow_fallback=true" in text
    for group in ("rope", "activation", "cross_entropy", "adamw", "accumulate"):
        assert f"ops.{group}=auto" in text and f"ops.{group}=reference" in text
    # the first two were chosen by the user, and the third is not one of this package's kernels
    assert not any(f"ops.{group}=auto" in text for group in ("attention", "norm", "linear"))


def test_allow_fallback_goes_on_and_says_why(monkeypatch, capsys):
    missing_kernels(monkeypatch, "no manifest.json")
    select_ops(OpsConfig(allow_fallback=True), "cuda", torch.bfloat16)
    assert "not used: triton (no manifest.json" in capsys.readouterr().err


def test_flash_attn_is_not_first_where_documents_are_masked(monkeypatch):
    for name in ("flash_attn", "triton"):
        monkeypatch.setitem(
            providers.PROVIDERS, name, dataclasses.replace(providers.PROVIDERS[name], missing=lambda: "")
        )
    for documents, expected in ((False, "flash_attn"), (True, "triton")):
        for first in ((), ("flash_attn", "triton", "cudnn", "sdpa")):  # shipped.yaml: sm_90 with extras
            conditions = select.Conditions("cuda", torch.bfloat16, AttentionNeeds(documents))
            outcome = select.choose("attention", "auto", conditions, first)
            assert outcome.provider.name == expected


@pytest.mark.parametrize(
    ("group", "key", "limit", "instead"),
    [
        ("attention", "head_dim", 256, "sdpa"),
        ("rope", "rotated_dims", 256, "reference"),
        ("experts", "experts", 1024, "reference"),
        ("experts", "top_k", 16, "reference"),
    ],
)
def test_auto_takes_no_kernel_whose_limit_the_model_exceeds(monkeypatch, group, key, limit, instead):
    for name in ("flash_attn", "triton", "sdpa"):
        monkeypatch.setitem(
            providers.PROVIDERS, name, dataclasses.replace(providers.PROVIDERS[name], missing=lambda: "")
        )
    for size, expected in ((limit, {"flash_attn", "triton"}), (limit + 1, {instead})):
        conditions = select.Conditions("cuda", torch.bfloat16, sizes=providers.Sizes(**{key: size}))
        outcome = select.choose(group, "auto", conditions)
        assert outcome.provider.name in expected
    assert f"triton supports {key} up to {limit}, not {limit + 1}" in outcome.why


def test_flash_attn_built_for_triton_is_refused_before_it_compiles(monkeypatch, tmp_path):
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("from flash_attn import flash_attn_interface")
    (package / "flash_attn_interface.py").write_text("USE_TRITON_ROCM = True")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("flash_attn", "flash_attn.flash_attn_interface")
    with patch.dict(sys.modules):  # remove the stubs before later tests
        for name in names:
            sys.modules.pop(name, None)
        assert "Triton build" in providers.PROVIDERS["flash_attn"].missing()
        (package / "flash_attn_interface.py").write_text("USE_TRITON_ROCM = False  # the CK build")
        for name in names:
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        assert providers.PROVIDERS["flash_attn"].missing() == ""


def test_apex_of_pypi_is_recognised_and_refused(monkeypatch, tmp_path):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    assert "not NVIDIA's" in providers.apex_missing()
    (tmp_path / "apex" / "__init__.py").write_text("import pyramid_mailer_of_pypi")  # fails if it is imported
    assert "not NVIDIA's" in providers.apex_missing()
    (tmp_path / "apex" / "multi_tensor_apply.py").touch()
    assert "without its extensions amp_C, fused_layer_norm_cuda" in providers.apex_missing()
    for name in ("amp_C", "fused_layer_norm_cuda"):
        (tmp_path / f"{name}.py").touch()
    assert providers.apex_missing() == ""


@pytest.mark.parametrize("error", ["ImportError('undefined symbol: hipFoo')", "RuntimeError('0 active drivers')"])
def test_flash_attn_that_does_not_import_is_missing(monkeypatch, tmp_path, error):
    (tmp_path / "flash_attn.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    expected = error.replace("('", ": ").replace("')", "")
    assert providers.PROVIDERS["flash_attn"].missing() == f"flash-attn cannot be imported: {expected}"


def test_flash_attn_gets_documents_as_runs(monkeypatch):
    from frontier_llm.ops.flash_attn_provider import attention, document_starts

    documents = torch.tensor([[5, 5, 1, 1], [1, 1, 1, 2]])
    starts, longest = document_starts(documents)
    assert starts.tolist() == [0, 2, 4, 7, 8] and longest == 3

    def varlen(
        q, k, v, starts_q, starts_k, longest_q, longest_k, *, softmax_scale, causal, deterministic
    ):  # stand-in with the semantics of the package
        parts = []
        for begin, end in itertools.pairwise(starts_q):
            part = (x[begin:end, None] for x in (q, k, v))
            parts.append(reference.attention(*part, Scores(softmax_scale))[:, 0])
        return torch.cat(parts)

    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_varlen_func=varlen))
    q, k, v = (torch.randn(4, 2, 3, 8, dtype=torch.float64) for _ in range(3))
    got = attention(q, k, v, Scores(0.3, documents_BS=documents))
    torch.testing.assert_close(got, reference.attention(q, k, v, Scores(0.3, documents_BS=documents)))


@pytest.fixture
def gpu_ops(monkeypatch):
    """Let flash_attn, cudnn and the prebuilt kernels look available, and restore torch's deterministic switch."""
    for name in ("flash_attn", "triton", "cudnn"):
        provider = dataclasses.replace(
            providers.PROVIDERS[name],
            missing=lambda: "",
            version=lambda: "here",
            load=lambda name=name: {"attention": name},
            load_deterministic=lambda name=name: {"attention": f"{name}, deterministic"},
        )
        monkeypatch.setitem(providers.PROVIDERS, name, provider)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


def test_deterministic_ops_are_chosen_or_the_log_says_what_differs(gpu_ops, capsys):
    fastest = select_ops(OpsConfig(), "cuda", torch.bfloat16)
    assert fastest.attention == "flash_attn" and "attention (flash_attn)" in fastest.not_repeatable
    assert "a resume is not equal to the bit: attention (flash_attn)" in capsys.readouterr().err
    in_manifest = provenance(torch.device("cpu"), fastest)["equal_bits_in_two_runs"]
    assert in_manifest == f"no: {fastest.not_repeatable}"
    assert not torch.are_deterministic_algorithms_enabled()
    equal = select_ops(OpsConfig(deterministic=True), "cuda", torch.bfloat16)
    assert equal.attention == "flash_attn, deterministic" and equal.not_repeatable == ""
    assert provenance(torch.device("cpu"), equal)["equal_bits_in_two_runs"] == "yes"
    assert "not equal to the bit" not in capsys.readouterr().err
    assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()


def test_a_back_end_that_is_never_deterministic_is_refused_on_a_gpu_only(gpu_ops):
    with pytest.raises(BackendError, match="cudnn does not give equal bits in two runs") as caught:
        select_ops(OpsConfig(deterministic=True, attention="cudnn"), "cuda", torch.bfloat16)
    assert "ops.deterministic=false" in str(caught.value)
    conditions = select.Conditions("cuda", torch.bfloat16, deterministic=True)
    outcome = select.choose("attention", "auto", conditions, first=("cudnn", "sdpa", "triton"))
    assert outcome.provider.name == "triton" and "not used: cudnn" in outcome.why
    ops = select_ops(OpsConfig(deterministic=True, attention="sdpa"), "cpu", torch.bfloat16)
    assert ops.not_repeatable == "" and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("asked", "interval", "expected"), [("auto", 0, False), ("auto", 5, True), (False, 5, False), (True, 0, True)]
)
def test_auto_means_deterministic_if_steps_are_computed_twice(monkeypatch, asked, interval, expected):
    words = [f"ops.deterministic={str(asked).lower()}", f"guard.recompute_interval={interval}", "precision.dtype=bf16"]
    config = load_run("quickstart", words)
    with patch.object(select, "select_ops") as chosen:
        select.select_run_ops(config, "cpu", attends_in_parts=False)
    assert chosen.call_args.kwargs["deterministic"] is expected


def test_every_row_of_the_list_says_whether_it_is_deterministic():
    rows = {(row["op"], row["device"], row["backend"]): row["deterministic"] for row in backends("bf16")}
    assert {value for (_, device, _), value in rows.items() if device == "cpu"} == {"always"}
    on_gpu = {backend: value for (op, device, backend), value in rows.items() if (op, device) == ("attention", "cuda")}
    assert on_gpu == {
        "reference": "on request",
        "sdpa": "never",
        "cudnn": "never",
        "triton": "always",
        "flash_attn": "on request",
    }


def test_attention_that_misreads_a_view_of_fused_qkv_is_refused(monkeypatch):
    """As ROCm/pytorch#3230 on MI300X: `v` is read as if it were contiguous."""
    assert sdpa.views_missing("cpu") == ""
    right = sdpa.F.scaled_dot_product_attention

    def misread(q, k, v, **options):
        return right(q, k, v.as_strided(v.shape, torch.empty(v.shape).stride(), v.storage_offset()), **options)

    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", misread)
    sdpa.views_missing.cache_clear()
    assert "over views of a fused QKV has a wrong output" in sdpa.views_missing("cpu")
    sdpa.views_missing.cache_clear()


def test_weight_gradient_through_torch():
    from frontier_llm.ops.torch_linear import accumulate_weight_gradient_

    main = torch.ones(3, 4)
    grad = torch.randn(5, 3)
    x = torch.randn(5, 4)
    accumulate_weight_gradient_(main, grad, x)
    torch.testing.assert_close(main, 1 + grad.t() @ x)


def test_a_library_for_another_torch_is_said_to_be_so(monkeypatch, tmp_path):
    broken = tmp_path / "libfrontier_ops.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(native, "CPU_LIBRARY", broken)
    assert "does not load into torch" in native.load_cpu_library.__wrapped__()
    monkeypatch.setattr(native, "CPU_LIBRARY", tmp_path / "absent.so")
    assert "has not been built" in native.load_cpu_library.__wrapped__()
