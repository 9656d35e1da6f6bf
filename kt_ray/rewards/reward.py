"""From the option `reward` to what gives rewards."""

from __future__ import annotations

from pathlib import Path

from kt_ray.errors import UserError
from kt_ray.rewards.code_reward import CodeReward
from kt_ray.rewards.completion import Completion, Reward
from kt_ray.rewards.function_reward import FunctionReward
from kt_ray.rewards.json_schema import JsonSchema
from kt_ray.rewards.verifiers import ExactMatch, Numeric, Regex

__all__ = ["Completion", "Reward", "load_reward"]

VERIFIERS = {kind.name: kind for kind in (ExactMatch, Regex, Numeric, JsonSchema, CodeReward)}


def load_reward(text: str) -> Reward:
    """The reward that an option names: a verifier, `file.py` or `file.py:function`.

    Raises:
        UserError: there is none of this name, or the file cannot be imported.
    """
    if text in VERIFIERS:
        return VERIFIERS[text]()
    path, colon, function = (text, "", "") if text.endswith(".py") else text.rpartition(":")
    if not path.endswith(".py") or (colon and not function.isidentifier()):
        raise UserError(
            "reward names neither a verifier nor a Python file",
            observed=text or "nothing",
            required=f"{', '.join(VERIFIERS)}, file.py or file.py:function",
            remedy="set reward=numeric, or reward=FILE.py (docs/rewards.md)",
        )
    return FunctionReward(Path(path), function or "reward")
