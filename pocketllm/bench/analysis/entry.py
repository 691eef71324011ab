"""A contrast as the run document tells it; pure."""

import math
from typing import Any

from pocketllm.bench.analysis import stats
from pocketllm.bench.analysis.contrasts import Question, Result
from pocketllm.bench.latency import metric_of


def result_entry(question: Question, result: Result) -> dict[str, Any]:
    """One contrast: `ratio` is a time ratio with its 95 % interval, `estimate` its logarithm."""
    fit, k = result.fit, len(question.arm_set.arms)
    low, high = (float(end) for end in fit.interval())
    sd = float(fit.sd)
    return {
        "metric": result.metric,
        "arm": result.arm,
        "role": result.role.value,
        "unit": metric_of(result.metric).unit,
        "n": fit.n,
        "n_unit": fit.unit,
        "ratio": math.exp(float(fit.estimate)),
        "low": math.exp(low),
        "high": math.exp(high),
        "estimate": float(fit.estimate),
        "se": float(fit.se),
        "df": fit.df,
        "sd": sd,
        "p_holm": result.adjusted_p,
        "robust": [math.exp(value) if math.isfinite(value) else None for value in result.robust],
        "floor": None if result.floor is None else math.expm1(result.floor.value),
        "floor_source": None if result.floor is None else result.floor.source,
        "bias": math.expm1(result.bias),
        "margin": result.margin,
        "mde": stats.minimum_detectable_effect(sd, fit.n, fit.df),
        "blocks_to_resolve": stats.blocks_to_resolve(sd, result.margin, k) if fit.unit == "block" else None,
        "starts_to_resolve": stats.starts_to_resolve(sd, result.margin) if fit.unit == "start" else None,
        "primary": result.metric in question.scenario.primary,
        "verdict": None if result.verdict is None else result.verdict.word.value,
        "reason": None if result.verdict is None else result.verdict.reason,
        "outlying_blocks": result.num_outliers,
        "flips_without_outliers": result.flips,
    }
