"""Step times and memory of a model on devices, which are named one after the other."""

from typing import Any

from onbeat.perfmodel import memory, models, roofline
from onbeat.perfmodel.fitted import FitTarget
from onbeat.perfmodel.predictor import Predictor
from onbeat.perfmodel.runs import StepSeconds


def make_roofline(model: Any, device: Any, parameters: Any = None, **others: Any) -> StepSeconds:
    return roofline.make_roofline(FitTarget(model=model, device=device, **others), parameters)


def roofline_seconds(matrix: Any, model: Any, device: Any, parameters: Any = None, **others: Any) -> Any:
    return roofline.roofline_seconds(matrix, FitTarget(model=model, device=device, **others), parameters)


def make_step_time_model(kind: str, profile: Any = None, engine: Any = None, **target: Any) -> Predictor:
    return models.make_step_time_model(kind, FitTarget(**target), profile=profile, engine=engine)


def kv_capacity(model: Any, device: Any, **options: Any) -> memory.KVCapacity:
    target = {name: options.pop(name) for name in ("parallelism", "precision") if name in options}
    return memory.kv_capacity(FitTarget(model=model, device=device, **target), **options)
