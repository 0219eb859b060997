"""The WebShop environment: the text interface of ``session.Session``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Literal, get_args

import numpy as np
from gymnasium.error import ResetNeeded

from agentkit.envs.base import Info, TextEnv
from agentkit.envs.spaces import Text
from agentkit.envs.webshop import expert
from agentkit.envs.webshop.catalogue import open_catalogue
from agentkit.envs.webshop.goals import Split, split_range
from agentkit.envs.webshop.noun_extraction import Nouns, extractor
from agentkit.envs.webshop.pages import MODES, styled
from agentkit.envs.webshop.session import SEARCH, Session
from agentkit.errors import ConfigError

ObservationMode = Literal["text", "text_rich", "html", "compact"]


class WebShop(TextEnv):
    """Buy the product that an instruction asks for in a web shop.

    Action space: ``search[words]`` and ``click[label]``, as the current page allows.

    Observation space: the current page in the form of ``observation_mode``.

    Rewards: once, for the purchase, between 0 and 1: how well it fits the instruction. Only 1 is a success.

    Args:
        data: a data set of ``agentkit data list`` (``webshop-own``, ``webshop-small``, ``webshop-full``), or a folder
            with the files of one.
        split: draw goals from the ``"train"``, ``"eval"`` or ``"test"`` part; None draws from all.
        human_goals: use goals written by people instead of synthetic ones.
        observation_mode: ``"text"``, ``"text_rich"`` or ``"html"``, as in the benchmark, or ``"compact"``, which is
            easier for small models.
        show_attributes: items have a page that lists their attributes.
        price_seed: seed of prices and price limits.
        nouns: how the type reward finds nouns in names: ``"spacy"``, ``"tokens"``, a function from a text to words, or
            ``"auto"`` (spaCy if it is installed).
        render_mode: ``"ansi"`` or None.

    Raises:
        DataError: the data set is missing or damaged, or search is not installed.
        ConfigError: an argument is out of range, or the data set is unknown.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012 (gymnasium's own declaration)
    instructions = (
        "You are in a web shop. Buy what the task asks for, with all its options, within its price.\n"
        "Actions: search[words], and click[...] on a product's code, an option, next >, < prev, back to search, "
        "description, features, buy now."
    )
    max_turns = 15
    actions_per_turn = 1
    concurrency = "inline"
    deterministic = True

    def __init__(
        self,
        *,
        data: str = "webshop-own",
        split: Split | None = None,
        human_goals: bool = False,
        observation_mode: ObservationMode = "text",
        show_attributes: bool = False,
        price_seed: int = 0,
        nouns: str | Nouns = "auto",
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        if observation_mode not in MODES:
            raise ConfigError(f"observation_mode={observation_mode!r} must be one of {', '.join(MODES)}")
        if split not in (None, *get_args(Split)):
            raise ConfigError(f"split={split!r} must be 'train', 'eval', 'test' or None")
        if type(price_seed) is not int:  # it becomes part of a folder name
            raise ConfigError(f"price_seed={price_seed!r} must be a whole number")
        self._write = MODES[observation_mode]
        self._show_attributes = show_attributes
        self._nouns = nouns if callable(nouns) else extractor(nouns)
        self.catalogue = open_catalogue(data, human=human_goals, seed=price_seed)
        self.goals = split_range(split, self.catalogue.goals)
        self.action_space = Text(examples=("search[cotton shirt]", "click[next >]", "click[< prev]", "click[buy now]"))
        self.goal_number = 0
        self.session: Session | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Start an episode; ``options={"goal": k}`` selects the k-th goal of all splits, the benchmark's session.

        Raises ``ConfigError`` if the goal does not exist.
        """
        super().reset(seed=seed)
        number = (options or {}).get("goal")
        if number is None:
            number = self.catalogue.draw(self.goals, self.np_random)
        elif (
            isinstance(number, bool)
            or not isinstance(number, int | np.integer)
            or not 0 <= number < self.catalogue.goals
        ):
            raise ConfigError(f"goal={number!r} must be a whole number from 0 to {self.catalogue.goals - 1}")
        self.goal_number = int(number)
        goal = self.catalogue.goal(self.goal_number)
        self.session = Session(self.catalogue, goal, self.np_random, self._nouns, show_attributes=self._show_attributes)
        return self._write(self.session), self._info(self.session, True)

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        session = self.session
        if session is None or session.page == "done":
            raise ResetNeeded("the episode is over (or has not begun): call reset() first")
        valid = False
        match read_action(action.strip()):
            case "search", argument:
                session.search(argument.lower())
                valid = True
            case "click", argument:
                valid = session.click(argument.lower())
        reward = session.score.reward if session.score is not None else 0.0
        return self._write(session), reward, session.page == "done", False, self._info(session, valid)

    def expert(self) -> Iterator[str]:
        """Yield all actions from the current page to the purchase of the wanted product."""
        if self.session is None:
            raise ResetNeeded("call reset() before expert()")
        return expert.plan(self.session)

    def page(self) -> str:
        """Return the page as HTML for a browser."""
        if self.session is None:
            raise ResetNeeded("call reset() before page()")
        return styled(self.session)

    def action_of(self, fields: Mapping[str, str]) -> str:
        """Return the action of a submitted form: a button, a search, or the choice of an option."""
        if "search_query" in fields:
            return f"search[{fields['search_query']}]"
        return fields.get("action") or f"click[{next(iter(fields.values()), '')}]"

    def render(self) -> Any:
        """Return the page in the form of the observation (``ansi``)."""
        if self.session is None:
            raise ResetNeeded("call reset() before render()")
        return self._write(self.session) if self.render_mode == "ansi" else None

    def _info(self, session: Session, valid: bool) -> Info:
        labels = session.clickable()
        # The last bracket opens the argument, so a label that contains one cannot be used.
        admissible = [f"click[{label}]" for label in labels if label != SEARCH.lower() and "[" not in label]
        if session.page == "index":
            admissible = [f"search[{expert.search_words(session)}]"]
        info: Info = {
            "success": session.score is not None and session.score.reward == 1.0,
            "action_valid": valid,
            "admissible_actions": admissible,
            "goal": self.goal_number,
        }
        if session.score is not None:
            info["metrics"] = {
                **{name: float(part) for name, part in asdict(session.score).items() if part is not None},
                "same_product": float(session.item == session.goal.product),
                "searches": float(session.actions["search"]),
            }
        return info


def read_action(text: str) -> tuple[str, str] | None:
    """Return name and argument of an action, as the benchmark's ``re.match(r"(.+)\\[(.+)\\]", text)`` finds them.

    Runs in linear time; the regular expression searches again from every bracket.
    """
    line = text.partition("\n")[0]  # the characters that a dot matches
    end = line.rfind("]")
    opening = line.rfind("[", 0, max(end - 1, 0))  # the argument has at least one character
    return (line[:opening], line[opening + 1 : end]) if opening > 0 else None
