"""Worker process that plays games with TextWorld; a separate process, because Fast Downward is not thread-safe.

Invariant: feedback and commands are exactly those of TextWorld's ``PddlEnv`` with ALFWorld's wrappers, computed faster:
commands are filled in instead of derived by the grammar, a grammar is parsed once for all games that differ only in the
sentence of the task, and translations are cached.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agentkit.envs.alfworld import alfworld_package
from agentkit.envs.alfworld.handcoded_expert import Handcoded
from agentkit.envs.alfworld.pddl_translation import Translation, translated
from agentkit.envs.alfworld.planning import Fact, problem
from agentkit.envs.workers.fork_server import Handler

# Slow imports, shared by all workers through the fork server.
alfworld_package.load("alfworld.info")
fast_downward: Any = alfworld_package.load("fast_downward")
logic: Any = alfworld_package.load("textworld.envs.pddl.logic")
model: Any = alfworld_package.load("textworld.logic")
textgen: Any = alfworld_package.load("textworld.envs.pddl.textgen")
EntityInfo: Any = alfworld_package.load("textworld.generator.game").EntityInfo
Demangler: Any = alfworld_package.load("alfworld.agents.utils.misc").Demangler
Proposition, Variable = model.Proposition, model.Variable

_LIBRARY, _PLANNER = fast_downward.load_lib(), fast_downward.load_lib()
"""Two loaded copies with separate state: one for the game, one for planning. Loaded before forking, so that every
worker has its own copies."""
_TASK = re.compile(r'(?P<before>"rhs": )"(?P<sentence>Your task is to: [^"\\]*)"')
_UNKNOWN = "Your task is to: UNKNOWN GOAL."
_NOTHING = "Nothing happens."
_GO = ("gotolocation", "go to {r}")
"""The only action whose template reads a name from the state although the parameters contain it."""


class Unplayable(Exception):
    """A game that cannot be loaded."""


class _State(logic.PddlState):
    """A ``PddlState`` from an existing translation."""

    def __init__(self, translation: Translation, rules: Any) -> None:
        self._logic, self.downward_lib = rules, _LIBRARY
        self._facts, self._vars_by_name = defaultdict(set), {}
        self._vars_by_type, self._var_counts = defaultdict(set), Counter()
        self.name2type = translation.objects
        self._actions = {
            name: SimpleNamespace(parameters=[SimpleNamespace(name=n, type_name=t) for n, t in parameters])
            for name, parameters in translation.parameters.items()
        }
        _LIBRARY.load_sas(translation.sas.encode())
        self.add_facts(
            Proposition(predicate, [Variable(name, self.name2type[name]) for name in names])
            for predicate, names in translation.facts
        )
        atoms = (logic.Atom * _LIBRARY.get_state_size())()
        _LIBRARY.get_state(atoms)
        facts = (atom.get_fact(self.name2type) for atom in atoms)
        self.add_facts(fact for fact in facts if not fact.is_negation)


@functools.lru_cache(maxsize=8)
def _rules(grammar: str) -> Any:
    return logic.GameLogic(domain="", grammar=grammar)


def _game_logic(grammar: str, types: list[tuple[str, list[str]]]) -> Any:
    """Return the logic of a game: the parsed grammar is shared, the sentence of the task belongs to the game."""
    found = _TASK.search(grammar)
    if found is None:
        rules, sentence = _rules(grammar), None
    else:
        skeleton = f'{grammar[: found.start()]}{found["before"]}"{_UNKNOWN}"{grammar[found.end() :]}'
        rules, sentence = _rules(skeleton), found["sentence"]
    own = logic.GameLogic.__new__(logic.GameLogic)
    own.domain, own.actions, own.types = "", rules.actions, model.TypeHierarchy()
    own.grammar = textgen.ContextSensitiveGrammar()
    own.grammar.update(rules.grammar)
    if sentence is not None:
        own.grammar._rules["task"] = [textgen.ProductionRule("task", [textgen.TerminalSymbol(sentence)])]
    for name, above in types:
        with contextlib.suppress(ValueError):  # declared twice in the grammar
            own.types.add(model.Type(name, above))
    return own


class Game:
    """One game in progress. Raises ``Unplayable`` if it cannot be loaded."""

    def __init__(self, data: dict[str, Any], cache: Path | None) -> None:
        try:
            self._texts = str(data["pddl_domain"]), str(data["pddl_problem"])
            translation = translated(*self._texts, cache)
            self._logic = _game_logic(str(data["grammar"]), translation.types)
            self._state = _State(translation, self._logic)
            self._entities = _entities(self._state)
            self.feedback = self._derive("#intro#", {})
        except Exception as error:  # a broken game causes various errors in TextWorld, its grammars and Fast Downward
            raise Unplayable(f"{type(error).__name__}: {error}") from error
        self._look_around()

    @property
    def won(self) -> bool:
        return bool(self._state.check_goal())

    def step(self, command: str) -> bool:
        """Execute a command; return whether it exists."""
        action = self.commands.get(command)
        if action is None:
            self.feedback = _NOTHING
            return False
        self._state.apply(action)
        self.feedback = self._derive(action.feedback_rule, action.mapping)
        self._look_around()
        return True

    def plan(self) -> list[str]:
        """Return the planner's commands to the goal; none if there is no plan."""
        domain, original = self._texts
        facts = (Fact(fact.name, tuple(v.name.lower() for v in fact.arguments)) for fact in self._state.facts)
        _, sas = fast_downward.pddl2sas(domain, problem(facts, self._state.name2type, original), optimize=True)
        if not _PLANNER.solve_sas(sas.encode(), False):
            return []
        operators = (fast_downward.Operator * _PLANNER.get_last_plan_length())()
        _PLANNER.get_last_plan(operators)
        plan = self._state.plan_to_templated_actions([operator.name for operator in operators], self._entities)
        return [command.strip() for command in plan]

    def facts(self) -> list[Any]:
        """Return the facts of the current state, with the names of the game."""
        return [
            Proposition(fact.name, [Variable(self._entities[v.name].name, v.type) for v in fact.arguments])
            for fact in self._state.facts
        ]

    def _look_around(self) -> None:
        """Return the commands of the current state; if two actions have the same command, the first one is used."""
        self.commands: dict[str, Any] = {}
        for action in self._state.all_applicable_actions():
            self.commands.setdefault(self._command(action), action)

    def _command(self, action: Any) -> str:
        template = _GO[1] if action.name == _GO[0] else action.command_template
        if "[" in template or "#" in template:
            return self._derive(template, action.mapping)
        return template.format(**{place.name: self._entities[v.name].name for place, v in action.mapping.items()})

    def _derive(self, symbol: str, mapping: Any) -> str:
        context = {
            "state": self._state,
            "facts": [],
            "variables": {place.name: self._entities[variable.name] for place, variable in mapping.items()},
            "mapping": mapping,
            "entity_infos": self._entities,
        }
        return self._logic.grammar.derive(symbol, context)


def _entities(state: Any) -> dict[str, Any]:
    """Return all entities of a game by the names that ALFWorld gives them."""
    entities = {v.name: EntityInfo(v.name, v.type) for fact in state.facts for v in fact.arguments}
    demangler = Demangler(game_infos=entities)
    for entity in entities.values():
        entity.name, entity.definite, entity.indefinite = demangler.demangle_alfred_name(entity.id), "the", "a"
    return entities


class Engine:
    """Answers the calls ``load``, ``step`` and ``plan`` of an environment."""

    def __init__(self) -> None:
        self._game: Game | None = None
        self._expert: Handcoded | None = None

    def load(
        self, path: str, goal: dict[str, Any], upgrade: bool, expert_seed: int | None, cache: str | None
    ) -> dict[str, Any]:
        """Load a game; with ``expert_seed`` the hand-coded expert observes it."""
        self._game = self._expert = None
        try:
            data = json.loads(Path(path).read_text("utf-8"))
            if upgrade:
                data = upgraded(data)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Unplayable(f"{type(error).__name__}: {error}") from error
        game = self._game = Game(data, None if cache is None else Path(cache))
        if expert_seed is not None:
            self._expert = Handcoded(goal, expert_seed, game.feedback)
        return self._said(True)

    def step(self, command: str) -> dict[str, Any]:
        game = self._playing()
        valid = game.step(command)
        if self._expert is not None:
            self._expert.watch(command, game.feedback, list(game.commands), game.facts(), game.won)
        return self._said(valid)

    def plan(self) -> list[str]:
        """Return the planner's whole plan, or the next command of the hand-coded expert."""
        if self._expert is None:
            return self._playing().plan()
        return [] if self._expert.next is None else [self._expert.next]

    def _playing(self) -> Game:
        if self._game is None:
            raise RuntimeError("no game is loaded")
        return self._game

    def _said(self, valid: bool) -> dict[str, Any]:
        game = self._playing()
        return {"feedback": game.feedback, "won": game.won, "valid": valid, "commands": sorted(game.commands)}


def upgraded(data: dict[str, Any]) -> dict[str, Any]:
    """Return a game of an older version with the domain and grammar of 2.1.2, as the official patch does."""
    found = _TASK.search(data["grammar"])
    if found is None:
        raise ValueError("its grammar says no task")
    domain, grammar = alfworld_package.texts()
    return {**data, "pddl_domain": domain, "grammar": grammar.replace(_UNKNOWN, found["sentence"])}


def make_handler() -> Handler:
    """Return what answers calls in a worker process. Output of native code is discarded."""
    discard = os.open(os.devnull, os.O_WRONLY)
    os.dup2(discard, 1)
    engine = Engine()

    def handle(name: str, *arguments: Any) -> tuple[str, Any]:
        try:
            return "ok", getattr(engine, name)(*arguments)
        except Unplayable as error:
            return "unplayable", str(error)
        except Exception as error:
            return "crashed", f"{name} raised {type(error).__name__}: {error}"

    return handle


_rules(alfworld_package.texts()[1])
