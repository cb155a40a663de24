"""Matches a LoRA checkpoint's tensors with its configuration and with the base, leaving none over.

This file knows PEFT's tensor names and the shapes they must have. It refuses to know contents: it
works on headers alone, so a wrong upload is refused before a weight is read.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from loraplex.engine.checkpoint import BLOCK_OF
from loraplex.engine.images import BaseManifest
from loraplex.engine.peft_config import PeftConfig, selects
from loraplex.engine.reasons import Findings, shown
from loraplex.engine.safetensors_header import Tensor

MAX_RANK = 512
Linear = tuple[int, str]  # layer, and the module's name as in the base's manifest
Parts = dict[str, Tensor]  # by what they are: "A", "B", "bias", "magnitude"

_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<root>(?:model\.)?)layers\.(?P<layer>0|[1-9][0-9]{0,4})\."
    r"(?P<block>self_attn|mlp)\.(?P<module>[a-z_]+)\."
    r"(?P<kind>lora_A|lora_B|lora_magnitude_vector)(?:\.default)?(?P<end>\.weight|\.bias|)"
)
_PARTS = {
    ("lora_A", ".weight"): "A",
    ("lora_B", ".weight"): "B",
    ("lora_B", ".bias"): "bias",
    ("lora_magnitude_vector", ".weight"): "magnitude",
    ("lora_magnitude_vector", ""): "magnitude",
}
_VOCABULARY = re.compile(r"lora_embedding_|embed_tokens|lm_head|token_adapter")
_EXAMPLE = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
_OTHER_BASE = "choose the base that the adapter was trained on"
_SAVE_AGAIN = "save the adapter again with PEFT's save_pretrained"
_NO_VOCABULARY = "train LoRA on the linear projections alone: the vocabulary is the base's own"


@dataclass(frozen=True)
class LoraModule:
    """One adapted linear: `a` is `[rank, in]`, `b` `[out, rank]`, `bias` and `magnitude` `[out]`.

    It adds `scaling · (x Aᵀ) Bᵀ + scaling · bias`; with a magnitude (DoRA, Liu et al. 2024) each
    row of the sum of base and delta is scaled to that norm.
    """

    layer: int
    name: str
    rank: int
    scaling: float
    a: Tensor
    b: Tensor
    bias: Tensor | None
    magnitude: Tensor | None

    @property
    def place(self) -> str:
        """The linear in words."""
        return f"{self.name} of layer {self.layer}"


def match_modules(
    config: PeftConfig | None,
    tensors: Mapping[str, Tensor],
    base: BaseManifest,
    findings: Findings,
) -> list[LoraModule]:
    """The adapted linears in order, or none when anything does not fit: `findings` say what.

    Without a configuration only the tensors' names are checked.
    """
    root, found = _sort_out(tensors, base, findings)
    if config is None:
        return []
    _check_targets(config, base, root, found, findings)
    _check_invocation(config, base, findings)
    for (layer, name), parts in found.items():
        path = module_path(root, layer, name)
        _check_parts(path, parts, config, findings)
        _check_shapes(path, parts, config.rank_of(path), base.modules[name], findings)
    if findings.reasons:
        return []
    return [_module(config, root, linear, found[linear]) for linear in _linears(base, found)]


def module_path(root: str, layer: int, name: str) -> str:
    """A linear's path in the base as PEFT saw it; `root` is "model." or, for a bare stack, ""."""
    return f"{root}layers.{layer}.{BLOCK_OF[name]}.{name}"


def _linears(base: BaseManifest, among: Collection[Linear] | None = None) -> list[Linear]:
    everything = [(layer, name) for layer in range(base.num_layers) for name in base.modules]
    return [linear for linear in everything if among is None or linear in among]


def _module(config: PeftConfig, root: str, linear: Linear, parts: Parts) -> LoraModule:
    path = module_path(root, *linear)
    rank = config.rank_of(path)
    return LoraModule(
        *linear,
        rank,
        config.scaling_of(path, rank),
        parts["A"],
        parts["B"],
        parts.get("bias"),
        parts.get("magnitude"),
    )


def _sort_out(
    tensors: Mapping[str, Tensor], base: BaseManifest, findings: Findings
) -> tuple[str, dict[Linear, Parts]]:
    """The tensors by linear and part, and the root of their names."""
    found: dict[Linear, Parts] = {}
    roots = set()
    for name, tensor in tensors.items():
        place = _place(name, base, findings)
        if place is None:
            continue
        root, linear, part = place
        roots.add(root)
        parts = found.setdefault(linear, {})
        if part in parts:
            findings.reject("tensor_duplicate", f"{name} comes twice", "keep one of the two names")
        parts[part] = tensor
    if len(roots) > 1:
        detail = 'some names count layers from "model.layers", some from "layers"'
        findings.reject("names_mixed", detail, _SAVE_AGAIN)
    return max(roots, default="model."), found


def _place(name: str, base: BaseManifest, findings: Findings) -> tuple[str, Linear, str] | None:
    """What a tensor's name says: root, linear and part."""
    match = _NAME.fullmatch(name)
    part = _PARTS.get((match["kind"], match["end"])) if match else None
    if match is None or part is None:
        findings.reject(*_unknown_name(name))
        return None
    layer, module = int(match["layer"]), match["module"]
    if layer >= base.num_layers:
        detail = f"{name} is of layer {layer}; {base.name} has layers 0 to {base.num_layers - 1}"
        findings.reject("layer_unknown", detail, _OTHER_BASE)
        return None
    if module not in base.modules or BLOCK_OF[module] != match["block"]:
        detail = f"{name} is of {match['block']}.{module}"
        served = ", ".join(base.modules)
        findings.reject("module_unknown", detail, f"the linears of {base.name} are {served}")
        return None
    return match["root"], (layer, module), part


def _unknown_name(name: str) -> tuple[str, str, str]:
    """Code, detail and cure for a tensor whose name is not one of those read here."""
    if "modules_to_save" in name or "original_module" in name:
        cure = "train LoRA on the linear projections alone, without modules_to_save"
        return "unsupported_modules_to_save", f"{name} is a module saved whole", cure
    if _VOCABULARY.search(name):
        return "unsupported_vocabulary", f"{name} changes the vocabulary", _NO_VOCABULARY
    if ".lora_" in name:
        cure = f"name the tensors as PEFT does for a causal language model, as in {_EXAMPLE}"
        return "tensor_unknown", f"{name} is under no prefix that is known here", cure
    return "tensor_unknown", f"{name} is no LoRA tensor", f"leave it out, or {_SAVE_AGAIN}"


def _check_targets(
    config: PeftConfig,
    base: BaseManifest,
    root: str,
    found: Mapping[Linear, Parts],
    findings: Findings,
) -> None:
    """The linears that the configuration adapts are exactly those that have tensors."""
    _check_target_names(config, base, root, findings)
    _check_patterns(config, [module_path(root, *linear) for linear in found], findings)
    for layer in sorted((config.layers or frozenset()) - set(range(base.num_layers))):
        detail = f"layers_to_transform names layer {layer}, which {base.name} has not"
        findings.reject("layer_unknown", detail, _OTHER_BASE)
    wanted = {x for x in _linears(base) if config.covers(module_path(root, *x), x[0])}
    names = ", ".join(f'"{n}"' for n in base.modules if any(name == n for _, name in found))
    cure = f"the weights hold {names or 'no linear'}: make target_modules and layers say the same"
    if not wanted:
        detail = f"target_modules selects no linear of {base.name}"
        findings.reject("module_missing", detail, cure)
    for linear in _linears(base, wanted - found.keys()):
        detail = f"{module_path(root, *linear)} is a target and has no tensors"
        findings.reject("module_missing", detail, cure)
    for linear in _linears(base, found.keys() - wanted):
        detail = f"{module_path(root, *linear)} has tensors and is no target"
        findings.reject("module_unexpected", detail, cure)


def _check_target_names(
    config: PeftConfig, base: BaseManifest, root: str, findings: Findings
) -> None:
    paths = [module_path(root, *linear) for linear in _linears(base)]
    for name in config.targets if isinstance(config.targets, tuple) else ():
        if any(selects((name,), path) for path in paths):
            continue
        if name.rsplit(".", 1)[-1] in ("embed_tokens", "lm_head"):
            detail = f"target_modules names {shown(name)}"
            findings.reject("unsupported_vocabulary", detail, _NO_VOCABULARY)
        else:
            detail = f"target_modules names {shown(name)}, which {base.name} has not"
            findings.warn("target_unknown", detail, "nothing was adapted by that name")


def _check_invocation(config: PeftConfig, base: BaseManifest, findings: Findings) -> None:
    for token in sorted(set(config.invocation)):
        if token >= base.vocab_size:
            detail = (
                f"alora_invocation_tokens holds {shown(token)}; {base.name} has tokens 0 to "
                f"{base.vocab_size - 1}"
            )
            findings.reject("token_unknown", detail, _OTHER_BASE)


def _check_patterns(config: PeftConfig, paths: list[str], findings: Findings) -> None:
    for field, patterns in (("rank_pattern", config.ranks), ("alpha_pattern", config.alphas)):
        for pattern, _ in patterns:
            if not any(pattern.matches_end(path) for path in paths):
                detail = (
                    f"{field} holds {shown(pattern.text)}, which is the end of no linear's path"
                )
                findings.warn("pattern_unused", detail, "it was ignored, as PEFT ignores it")


def _check_parts(path: str, parts: Parts, config: PeftConfig, findings: Findings) -> None:
    """Exactly the parts that the configuration asks for."""
    wanted = {"A", "B"} | ({"bias"} if config.bias else set())
    wanted |= {"magnitude"} if config.dora else set()
    cure = f"make use_dora and lora_bias say what the weights hold, or {_SAVE_AGAIN}"
    for part in sorted(wanted - parts.keys()):
        findings.reject("tensor_missing", f"{path} has no {part}", cure)
    for part in sorted(parts.keys() - wanted):
        findings.reject("tensor_unexpected", f"{path} has a {part}", cure)


def _check_shapes(
    path: str, parts: Parts, rank: int, sizes: tuple[int, int], findings: Findings
) -> None:
    wide_in, wide_out = sizes
    has = _rank(parts, rank)
    if has != rank:
        detail = f"{path} has rank {has}, adapter_config.json says {rank}"
        findings.reject("rank_mismatch", detail, "make r and rank_pattern agree with the weights")
    if has > MAX_RANK:
        findings.reject("rank_too_large", f"{path} has rank {has}", f"train at most {MAX_RANK}")
    wanted = {
        "A": (has, wide_in),
        "B": (wide_out, has),
        "bias": (wide_out,),
        "magnitude": (wide_out,),
    }
    for part, tensor in parts.items():
        if tensor.shape != wanted[part]:
            detail = f"{path}: {part} is {list(tensor.shape)}, and must be {list(wanted[part])}"
            findings.reject("shape_mismatch", detail, _OTHER_BASE)


def _rank(parts: Parts, otherwise: int) -> int:
    shape = parts["A"].shape if "A" in parts else ()
    return shape[0] if len(shape) == 2 else otherwise
