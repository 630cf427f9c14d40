"""A recipe: everything that defines a run, as validated data. Light to import."""

from __future__ import annotations

from everfed.recipe.objects import Parts, composition
from everfed.recipe.problems import Places, placed
from everfed.recipe.reading import (
    Reading,
    Source,
    from_table,
    read,
    read_placed,
    scaled,
    settled,
    share,
    to_toml,
    unused_settings,
)
from everfed.recipe.schema import (
    CompareSection,
    EngineSection,
    EvalSection,
    MethodSection,
    ModelSection,
    OptimizerSection,
    PrivacySection,
    Recipe,
    StreamSection,
    TrainSection,
)
from everfed.recipe.settings import Sets, as_entries, flat, parse_set, parse_value

__all__ = [
    "CompareSection",
    "EngineSection",
    "EvalSection",
    "MethodSection",
    "ModelSection",
    "OptimizerSection",
    "Parts",
    "Places",
    "PrivacySection",
    "Reading",
    "Recipe",
    "Sets",
    "Source",
    "StreamSection",
    "TrainSection",
    "as_entries",
    "composition",
    "flat",
    "from_table",
    "parse_set",
    "parse_value",
    "placed",
    "read",
    "read_placed",
    "scaled",
    "settled",
    "share",
    "to_toml",
    "unused_settings",
]
