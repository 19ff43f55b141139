"""Checks of the report's switches, files and commands, with the training loop of ``memfix train``."""

from __future__ import annotations

import torch

from ....errors import UsageError
from ....laws import NAIVE
from ....ops.npt_linear import FORMS, npt_linear
from ....ops.npt_linear.contract import contract
from ...distributed import ALONE_ON_CPU
from ...evidence import fixed_seed, raised
from ...incident import load_config
from ...judging import METER, ON_CPU, CheckResult, as_recorded, check, holds_if, sizes
from ...training import Run
from ..incident import incident
from ..int8_linear import Int8Linear, make_8bit
from ..layer import OFFLOAD, NptLinear
from ..model import SIZES
from . import LLAMA_8B, SHRUNKEN, Evidence, drawn, linear, model

OPTIMIZED = "config_optimized.yaml"


def _run(evidence: Evidence, *overrides: str, file: str = "") -> Run:
    with fixed_seed():
        return Run(incident, evidence.config(*SHRUNKEN, *overrides, file=file), ALONE_ON_CPU)


@check("NPT-11")
def tuples(evidence: Evidence) -> CheckResult:
    """Pass hidden states and attention as tensors and as tuples; try a list and an empty tuple."""
    layer = NptLinear(linear(6, 7), 2)
    torch.nn.init.ones_(layer.b)
    hidden, attention = drawn(2, 3, 6), drawn(2, 3, 6, seed=1)

    def out(hidden: object, attention: object) -> torch.Tensor:
        layer.remember(layer, (), attention)
        return layer(hidden)

    ways = [(h, x) for h in (hidden, (hidden,), (hidden, None)) for x in (attention, (attention,), (attention, None))]
    equal = all(torch.equal(out(*way), out(hidden, attention)) for way in ways)
    refused = f"{raised(out, [hidden], attention)}, {raised(out, (), attention)}"
    return holds_if(equal and refused == "TypeError, ValueError", ON_CPU, ways=len(ways), refused=refused)


@check("NPT-12")
def default_batch(evidence: Evidence) -> CheckResult:
    size = evidence.config().training.batch_size
    return holds_if(size == 1, "configs/config.yaml", batch_size=size)


@check("NPT-13")
def accumulation(evidence: Evidence) -> CheckResult:
    """Compare the gradients of 4 x 8 and of 1 x 32 examples, some labels ignored; also with a mean per forward."""
    gradients = []
    for batch_size, forwards in ((4, 8), (1, 32)):
        cut = (f"training.batch_size={batch_size}", f"training.gradient_accumulation_steps={forwards}")
        run = _run(evidence, *cut, "data.prompt_fraction=0.9", "data.context_length=6")
        batches = list(run._batches())
        counts = [incident.num_targets(batch) for batch in batches]
        one_by_one = [([batch], count * forwards) for batch, count in zip(batches, counts, strict=True)]
        for passes in ([(batches, sum(counts))], one_by_one):
            for some, divisor in passes:
                run.train_step.accumulate(some, divisor)
            gradients.append(torch.cat([p.grad.flatten() for p in run.model.parameters() if p.grad is not None]))
            run.train_step.forget_gradients()
    of_sum, of_means, other_sum, other_means = gradients
    equal, means_equal = (
        torch.dist(one, other) < 1e-4 * one.norm() for one, other in ((of_sum, other_sum), (of_means, other_means))
    )
    holds = bool(equal) and evidence.config().training.gradient_accumulation_steps == 4 * 8
    words = {True: "equal", False: "different"}
    return holds_if(holds, ON_CPU, examples=32, gradients=words[bool(equal)], means=words[bool(means_equal)])


@check("NPT-14")
def efficiency_test(evidence: Evidence) -> CheckResult:
    """Do what the report's tool does: compute the bytes of the delta, and compare every form with naive."""
    given = [drawn(2, 4, 6), drawn(6, 7, seed=1), drawn(6, 2, seed=2), drawn(2, 7, seed=3), drawn(2, 4, 2, seed=4)]
    forms = [form for form in FORMS if form != "triton"]
    equal = [torch.allclose(npt_linear(*given, form=form), contract.naive(*given), rtol=1e-10) for form in forms]
    figures = sizes(delta=evidence.evaluate("B*S*D*F*e"), naive=evidence.peak(NAIVE, "forward"))
    return holds_if(all(equal), f"{ON_CPU}; {METER}", **figures)


@check("NPT-15")
def offload_switch(evidence: Evidence) -> CheckResult:
    """Read the switch in the optimized file, and the form of the layers in the model that it builds."""
    layers = [module for module in _run(evidence, file=OPTIMIZED).model.modules() if isinstance(module, NptLinear)]
    forms = ", ".join(sorted({layer.form for layer in layers}))
    is_on = evidence.config(file=OPTIMIZED).optimization.use_cpu_offload
    return holds_if(is_on and forms == OFFLOAD, f"configs/{OPTIMIZED}", form=forms, layers=len(layers))


@check("NPT-17")
def mixed_precision(evidence: Evidence) -> CheckResult:
    """Build a run with the file's mixed precision, and try another value."""
    run = _run(evidence, file=OPTIMIZED)
    scale = run.train_step.loss_scale
    return as_recorded(
        f"configs/{OPTIMIZED}",
        precision=run.config.training.precision,
        loss_scale=str(scale.scale if scale else None),
        fp17=raised(evidence.config, "optimization.mixed_precision=fp17"),
    )


@check("NPT-18")
def masters(evidence: Evidence) -> CheckResult:
    """Look at the parameters' dtypes, make a step overflow, and count the bytes of masters and copies."""
    run = _run(evidence, file=OPTIMIZED)
    trained, frozen = (
        {parameter.dtype for parameter in run.model.parameters() if parameter.requires_grad is trains}
        for trains in (True, False)
    )
    assert run.train_step.loss_scale is not None
    run.train_step.loss_scale.scale = 2.0**40
    before = [parameter.clone() for parameter in run.model.parameters()]
    skipped = run.take_step().skipped and all(map(torch.equal, before, run.model.parameters()))
    count = SIZES[LLAMA_8B].num_parameters
    _, num_trained = evidence.trained(OPTIMIZED)
    holds = trained == {torch.float32} and frozen == {torch.float16} and skipped
    figures = sizes(of_all=count * (4 + 2), ours=count * 2 + num_trained * (4 + 2))
    return holds_if(holds, f"{ON_CPU}; counted", overflow="skipped" if skipped else "taken", **figures)


@check("NPT-22")
def fewer_layers(evidence: Evidence) -> CheckResult:
    """Count the converted layers of both files, and the trained parameters that 12 fewer layers save."""
    (many, trained), (few, _) = evidence.trained("config.yaml"), evidence.trained(OPTIMIZED)
    saved = trained // many * (many - few)
    return holds_if((many, few) == (16, 4), "counted over the models", layers=few, saved=saved)


@check("NPT-23")
def smaller_rank(evidence: Evidence) -> CheckResult:
    """Count the trained parameters of one converted layer at both ranks."""
    (many, of_16), (few, of_8) = evidence.trained("config.yaml"), evidence.trained(OPTIMIZED)
    holds = of_16 // many == 2 * (of_8 // few)
    return holds_if(holds, "counted over the models", rank_16=of_16 // many, rank_8=of_8 // few)


@check("NPT-25")
def launch(evidence: Evidence) -> CheckResult:
    """Load the configs that the report launches, and an unknown one; train a tiny model of the small one's kind."""
    names = [load_config(incident, name).name for name in ("small", "config_optimized")]
    refused = raised(load_config, incident, "medium")
    steps = len(evidence.train(*SHRUNKEN, "model.size=tiny_gpt2", "training.steps=4", file="small"))
    holds = refused == UsageError.__name__ and steps == 4
    return holds_if(holds, "memfix train, shrunken", names=", ".join(names), unknown=refused)


@check("NPT-26")
def command(evidence: Evidence) -> CheckResult:
    """Train by the optimized file, with a tiny model."""
    run = _run(evidence, "training.steps=3", file=OPTIMIZED)
    taken = sum(not run.take_step().skipped for _ in range(3))
    return holds_if(taken == 3, "memfix train, shrunken", steps=taken)


@check("NPT-33")
def eight_bits(evidence: Evidence) -> CheckResult:
    """Count the bytes of the 8-bit weights and of what stays in 16 bits; try the switch on a CPU."""
    decoder = model(LLAMA_8B)
    make_8bit(decoder.layers)
    rounded = [module for module in decoder.modules() if isinstance(module, Int8Linear)]
    stored = sum(layer.weight.nbytes + layer.scale.nbytes for layer in rounded)
    expected = sum(layer.in_features * layer.out_features + 4 * layer.out_features for layer in rounded)
    rest = sum(parameter.numel() for parameter in decoder.parameters() if parameter.is_floating_point())
    on_cpu = raised(_run, evidence, "optimization.use_8bit=true")
    holds = stored == expected and on_cpu == UsageError.__name__
    return holds_if(holds, "counted over the model", on_cpu=on_cpu, **sizes(stored=stored, in_16_bits=2 * rest))


@check("NPT-35")
def two_files(evidence: Evidence) -> CheckResult:
    """Read both files, which must have batch 1 and 32 forwards."""
    cuts = {
        (config.training.batch_size, config.training.gradient_accumulation_steps)
        for config in (evidence.config(file=file) for file in ("config.yaml", OPTIMIZED))
    }
    return holds_if(cuts == {(1, 32)}, "configs/", cut=", ".join(f"{size} x {forwards}" for size, forwards in cuts))
