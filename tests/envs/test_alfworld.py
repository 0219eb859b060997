"""AlfWorld-v0 against TextWorld's own environment, on official and generated games; and its failures."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from gymnasium.error import ResetNeeded
from official import alfworld_games
from others import as_another
from processes import gone
from requiring import require

import agentkit
from agentkit import data as datasets
from agentkit.envs.alfworld import alfworld_package, generator, pddl_translation
from agentkit.envs.alfworld import env as module
from agentkit.envs.alfworld import games as listing
from agentkit.envs.alfworld.env import AlfWorld
from agentkit.envs.base import expert_actions
from agentkit.errors import ConfigError, DataError, EnvCrashed, EnvTimeout, RegistryError

SLOW = pytest.mark.slow


@pytest.fixture(scope="session")
def official(tmp_path_factory):
    """Return a folder of official games with only the requested splits."""
    shown = tmp_path_factory.mktemp("alfworld")

    def part(split):
        games = alfworld_games(split)
        if not (shown / split).exists():
            (shown / split).symlink_to(games)
        return shown

    return part


@pytest.fixture(scope="session")
def data_root(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def make(data_root, monkeypatch):
    """Create environments with the session's data and caches, and close them."""
    require("alfworld", alfworld_package.REMEDY)
    monkeypatch.setenv("AGENTKIT_DATA", str(data_root))
    made = []

    def make(**kwargs):
        made.append(agentkit.make("AlfWorld-v0", **kwargs))
        return made[-1]

    yield make
    for env in made:
        env.close()


def play(env, actions, **reset):
    observation, info = env.reset(**reset)
    seen = [(observation, 0.0, info["won"], info["admissible_actions"])]
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        assert not truncated
        assert terminated == info["won"] == info["success"]
        seen.append((observation, reward, terminated, info["admissible_actions"]))
    return seen


def solve(env, most=50, **reset):
    """Play the expert; returns whether it won and in how many steps."""
    _, info = env.reset(**reset)
    for steps, action in enumerate(expert_actions(env), 1):
        info = env.step(action)[4]
        if info["won"] or steps == most:
            return info["won"], steps
    return info["won"], 0


# What it plays.


@pytest.mark.official
@pytest.mark.slow
@pytest.mark.parametrize("upgrade", [False, True], ids=["2.1.1", "2.1.2"])
def test_official_games_are_played_as_textworld_plays_them(make, official, upgrade):
    import alfworld_reference as reference

    from agentkit.envs.alfworld.worker import upgraded

    env = make(data=str(official("valid_seen")), split="valid_seen", upgrade=upgrade, tasks=["look_at_obj_in_light"])
    env.reset(seed=0)
    data = json.loads(env.game.path.read_text())
    theirs = reference.make(upgraded(data) if upgrade else data)
    actions = reference.some_actions(theirs, 12, seed=1)
    assert play(env, actions, seed=0) == reference.episode(theirs, actions)


@pytest.mark.parametrize("task", [listing.TASKS[0], *(pytest.param(task, marks=SLOW) for task in listing.TASKS[1:])])
def test_each_task_is_played_as_textworld_plays_it_and_won_by_the_planner(make, task):
    import alfworld_reference as reference

    env = make(tasks=[task], split="valid_unseen")
    env.reset(seed=0)
    plan = list(env.expert())
    theirs = reference.make(json.loads(env.game.path.read_text()))
    played = play(env, plan, seed=0)
    assert played == reference.episode(theirs, plan)
    assert [won for _, _, won, _ in played] == [False] * len(plan) + [True]
    assert [reward for _, reward, _, _ in played] == [0.0] * len(plan) + [1.0]


@pytest.mark.slow
def test_a_plan_costs_the_same_as_fast_downwards(make):
    import alfworld_reference as reference

    env = make(tasks=["pick_clean_then_place_in_recep"], split="valid_seen")
    env.reset(seed=1)
    theirs = reference.make(json.loads(env.game.path.read_text())).unwrapped
    theirs.reset()
    whole = theirs._pddl_state.replan(theirs._entity_infos)
    assert whole
    assert reference.costs(list(env.expert())) == reference.costs(whole)


def test_the_planner_continues_from_any_state(make):
    env = make(tasks=["pick_and_place_simple"], split="valid_seen")
    _, info = env.reset(seed=2)
    taken = False
    for _ in range(20):  # hold something that is not wanted
        wanted = env.game.goal["object_target"].lower()
        take = [a for a in info["admissible_actions"] if a.startswith("take ") and a.split()[1] != wanted]
        others = [a for a in info["admissible_actions"] if a.startswith("open ")]
        others += [a for a in info["admissible_actions"] if a.startswith("go to ")]
        info = env.step((take or others)[0])[4]
        if taken := bool(take):
            break
    assert taken
    assert next(iter(env.expert())) not in ("look", "inventory")
    for action in env.expert():
        info = env.step(action)[4]
    assert info["won"]


@pytest.mark.parametrize("task", listing.TASKS)
def test_the_hand_coded_expert_wins_by_looking(make, task):
    env = make(tasks=[task], split="valid_seen", expert="handcoded")
    assert any(solve(env, seed=seed)[0] for seed in range(2))  # it does not always succeed


@pytest.mark.official
def test_the_hand_coded_expert_uses_the_games_commands(make, official):
    folder = str(official("valid_seen"))
    env = make(data=folder, split="valid_seen", expert="handcoded", tasks=["pick_and_place_simple"])
    assert any(solve(env, seed=seed)[0] for seed in range(3))


def test_consecutive_seeds_play_every_game_once(make):
    env = make(split="valid_seen")
    names = [env.reset(seed=seed)[1]["game"] for seed in range(7, 7 + 6)]
    assert len(set(names)) == 6
    assert len({game.name for game in env.games}) == len(env.games) == generator.COUNTS["valid_seen"]
    assert len({name.partition("-")[0] for name in names}) > 1
    few = make(split="valid_seen", num_games=4)
    assert few.games == env.games[:4]
    assert few.reset(seed=7)[1]["game"] == few.games[3].name
    again = env.reset(options={"game": names[3]})[1]["game"]
    assert again == names[3]
    with pytest.raises(ConfigError, match="game 'nowhere' is not one of"):
        env.reset(options={"game": "nowhere"})


def test_invalid_commands_change_nothing_and_are_counted(make):
    env = make(split="valid_seen", show_actions=True, render_mode="ansi")
    observation, info = env.reset(seed=0)
    assert observation.endswith(f"You can: {'; '.join(info['admissible_actions'])}.")
    before = info["admissible_actions"]
    observation, reward, terminated, _, info = env.step("fly \ud800 away")
    assert (reward, terminated, info["action_valid"]) == (0.0, False, False)
    assert observation.startswith("Nothing happens.")
    assert env.render() == observation
    assert info["admissible_actions"] == before
    assert info["metrics"] == {"steps": 1.0, "invalid_actions": 1.0}
    assert env.step("  look ")[4]["action_valid"]


def test_a_won_game_is_over(make):
    env = make(split="valid_seen")
    with pytest.raises(ResetNeeded):
        env.step("look")
    assert solve(env, seed=0)[0]
    assert list(env.expert()) == []
    with pytest.raises(ResetNeeded):
        env.step("look")


# Which games there are.


@pytest.mark.official
def test_the_official_filter(official, tmp_path):
    import alfworld_reference as reference

    folder = official("valid_seen")
    found = listing.games(folder, "valid_seen", tmp_path)
    assert len(found) == 140
    assert sorted(game.name for game in found) == reference.playable(folder / "valid_seen")
    for game in found:
        said = json.loads((game.path.parent / "traj_data.json").read_text())
        goal = {key: said["pddl_params"].get(key) for key in game.goal if key != "task_type"}
        assert game.goal == {"task_type": said["task_type"], **goal}
    with pytest.raises(DataError, match="valid_unseen"):
        listing.games(folder, "valid_unseen", tmp_path)


@pytest.mark.official
@pytest.mark.slow
def test_the_official_training_games(official, tmp_path):
    folder = official("train")
    found = listing.games(folder, "train", tmp_path)
    assert len(found) == 3553
    listing._listed.cache_clear()
    start = time.perf_counter()
    assert listing.games(folder, "train", tmp_path) == found
    assert time.perf_counter() - start < 2.0


def test_the_index_is_read_again_only_when_games_change(tmp_path, monkeypatch):
    root = tmp_path / "games" / "train"
    for number, task in enumerate(listing.TASKS):
        (root / f"{task}-Mug-None-Shelf-{number}" / "trial_1").mkdir(parents=True)
        text = json.dumps({"pddl_domain": "", "solvable": number != 2})
        (root / f"{task}-Mug-None-Shelf-{number}" / "trial_1" / listing.GAME).write_text(text)
    first = listing.games(tmp_path / "games", "train", tmp_path / "index")
    assert {game.task for game in first} == set(listing.TASKS) - {listing.TASKS[2]}
    listing._listed.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(listing, "_playable", lambda root: pytest.fail("walked again"))
        assert listing.games(tmp_path / "games", "train", tmp_path / "index") == first
    shutil.rmtree(root / f"{listing.TASKS[0]}-Mug-None-Shelf-0")
    assert len(listing.games(tmp_path / "games", "train", tmp_path / "index")) == 4


def test_games_that_arrive_in_folders_that_are_there_are_seen(tmp_path):
    trials = [tmp_path / "train" / f"{task}-Mug-None-Shelf-1" / "trial_1" for task in listing.TASKS]
    for trial in trials:
        trial.mkdir(parents=True)
        (trial / "traj_data.json").write_text("{}")
    with pytest.raises(DataError, match="holds no playable game"):
        listing.games(tmp_path, "train", tmp_path / "index")
    for number, trial in enumerate(trials):
        (trial / listing.GAME).write_text('{"solvable": true}')
        listing._listed.cache_clear()  # as in a new process
        assert len(listing.games(tmp_path, "train", tmp_path / "index")) == number + 1
    (trials[0] / listing.GAME).write_text('{"solvable": false}')
    listing._listed.cache_clear()
    assert len(listing.games(tmp_path, "train", tmp_path / "index")) == 5


def test_an_empty_index_is_not_stored(tmp_path):
    (tmp_path / "train" / "pick_and_place_simple-Mug-None-Shelf-1").mkdir(parents=True)
    for index in (None, tmp_path / "index"):
        with pytest.raises(DataError, match="holds no playable game"):
            listing.games(tmp_path, "train", index)
    assert not (tmp_path / "index").exists()


def test_unreadable_games_are_reported(tmp_path):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        os.makedirs(f"{folder}/train")
        os.chmod(f"{folder}/train", 0o700)
        with pytest.raises(DataError, match=r"games of split train in .* cannot be read: .*Permission denied"):
            as_another(listing.games, Path(folder), "train")


def test_a_task_may_be_given_alone(tmp_path):
    listed = tuple(listing.GameFile(f"{task}-Mug-None-Shelf-1/trial_1", tmp_path) for task in listing.TASKS)
    assert listing.select(listed, listing.TASKS[5]) == listing.select(listed, [listing.TASKS[5]]) == (listed[5],)
    with pytest.raises(ConfigError, match=r"tasks=\['dance'\]: the tasks are pick_and_place_simple"):
        listing.select(listed, "dance")


# What is kept.


def test_translations_are_shared_between_users(monkeypatch):
    made = pddl_translation.Translation("sas", [], {}, [], {})
    monkeypatch.setattr(pddl_translation, "_translate", lambda domain, problem: made)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        kept = Path(folder) / "kept"
        assert pddl_translation.translated("domain", "problem", kept) == made
        monkeypatch.setattr(pddl_translation, "_translate", lambda domain, problem: pytest.fail("translated again"))
        assert as_another(pddl_translation.translated, "domain", "problem", kept) == made
        assert len(os.listdir(kept)) == 1


def test_a_full_disk_costs_time_only_and_nothing_is_left(monkeypatch, tmp_path):
    made = pddl_translation.Translation(os.urandom(1_000).hex(), [], {}, [], {})
    monkeypatch.setattr(pddl_translation, "_translate", lambda domain, problem: made)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        assert pddl_translation.translated("domain", "problem", tmp_path) == made
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []


def test_games_of_read_only_data_are_translated_once(make, monkeypatch, tmp_path):
    folder = str(make(split="valid_seen").games[0].path.parents[3])
    monkeypatch.setenv("AGENTKIT_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(datasets, "_writable", lambda folder: False)  # root could
    make(data=folder, split="valid_seen").reset(seed=0)
    assert os.listdir(tmp_path) == [f"agentkit-data-{os.getuid()}"]
    kept = [path.suffix for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(kept) == [".json", ".z"]


def test_games_can_be_played_without_a_writable_directory(make, monkeypatch, tmp_path):
    folder = str(make(split="valid_seen").games[0].path.parents[3])
    (tmp_path / "data").write_text("a file")
    monkeypatch.setenv("AGENTKIT_DATA", str(tmp_path / "data"))
    assert make(data=folder, split="valid_seen").reset(seed=0)[1]["game"]


@pytest.mark.official
def test_game_files_are_left_alone(make, official, tmp_path):
    folder = tmp_path / "read-only"
    source = listing.games(official("valid_seen"), "valid_seen")[0]
    shutil.copytree(source.path.parent, folder / "valid_seen" / source.name)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    env = make(data=str(folder), split="valid_seen")
    env.reset(seed=0)
    env.step("look")
    list(env.expert())
    env.close()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_game_that_does_not_load_is_reported_once_and_passed_over(make, tmp_path, data_root):
    own = listing.games(data_root / "alfworld-own", "valid_seen") if (data_root / "alfworld-own").exists() else ()
    good = own[0] if own else make(split="valid_seen").games[0]
    shutil.copytree(good.path.parent, tmp_path / "train" / good.name)
    for number, text in enumerate(['{"solvable": true}', "no JSON", '{"pddl_domain": "(", "grammar": "x"}']):
        bad = tmp_path / "train" / f"pick_and_place_simple-Mug-None-Shelf-{number}" / "trial_1"
        bad.mkdir(parents=True)
        (bad / listing.GAME).write_text(text.replace("}", ', "solvable": true}') if number == 2 else text)
    env = make(data=str(tmp_path))
    assert len(env.games) == 4
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert {env.reset(seed=seed)[1]["game"] for seed in range(8)} == {good.name}
    assert len(caught) == 3
    assert all("cannot be played and is skipped" in str(one.message) for one in caught)
    with pytest.raises(EnvCrashed, match="no game can be played"):
        env.reset(options={"game": "pick_and_place_simple-Mug-None-Shelf-0/trial_1"})


def test_arguments_without_a_meaning_are_refused(make, tmp_path):
    for kwargs, message in (
        ({"split": "test"}, "split='test' must be one of train, valid_seen, valid_unseen"),
        ({"tasks": ["dance"]}, "the tasks are pick_and_place_simple"),
        *(({"num_games": number}, "whole number of at least 1") for number in (0, -3, 1.5, "two", True)),
        ({"expert": "human"}, "'planner' or 'handcoded'"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(**kwargs)
    with pytest.raises(DataError, match="holds no ALFWorld games of split train"):
        make(data=str(tmp_path))
    with pytest.raises(DataError, match="agentkit data fetch alfworld"):
        make(data="alfworld")


def test_without_the_extra_the_error_names_the_package_to_install(monkeypatch):
    monkeypatch.setattr(
        alfworld_package.importlib.util, "find_spec", lambda name: None if name == "fast_downward" else name
    )
    with pytest.raises(RegistryError, match=r'needs fast_downward.*pip install "agentkit-rl\[alfworld\]"'):
        agentkit.make("AlfWorld-v0")


# Our own games.


@pytest.mark.official
def test_generated_games_have_the_official_form_and_the_splits_share_nothing(official):
    require("alfworld", alfworld_package.REMEDY)
    theirs = json.loads(listing.games(official("valid_seen"), "valid_seen")[0].path.read_text())
    made = {split: [generator.generate(split, index) for index in range(48)] for split in listing.SPLITS}
    for split in listing.SPLITS:
        games = made[split]
        assert all(set(game.game) == set(theirs) for game in games)
        assert games[7] == generator.generate(split, 7)
        assert [game.folder.partition("-")[0] for game in games[:6]] == list(listing.TASKS)
        for game in games:
            file = listing.GameFile(game.folder, Path())
            said = game.trajectory["pddl_params"]
            assert {key: file.goal[key] for key in said} == said
    tasks = {split: {game.folder.partition("/")[0] for game in games} for split, games in made.items()}
    rooms = {split: {name.rsplit("-", 1)[1] for name in names} for split, names in tasks.items()}
    assert not tasks["train"] & tasks["valid_seen"]
    assert not rooms["valid_unseen"] & (rooms["train"] | rooms["valid_seen"])
    train = [generator.generate("train", index).folder for index in range(generator.COUNTS["train"])]
    assert rooms["valid_seen"] <= {folder.partition("/")[0].rsplit("-", 1)[1] for folder in train}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("split", listing.SPLITS)
def test_games_of_ours_are_won_by_the_planner(make, split):
    env = make(split=split)
    step = 4 if split == "train" else 1  # of all rooms and tasks, in minutes
    lost = [env.games[seed].name for seed in range(0, len(env.games), step) if not solve(env, seed=seed)[0]]
    assert lost == []


# What may go wrong.


def worker_of(env: AlfWorld) -> psutil.Process:
    assert env._worker.pid is not None
    return psutil.Process(env._worker.pid)


def test_a_process_that_dies_is_a_crash_and_the_next_reset_has_a_fresh_one(make):
    env = make(split="valid_seen")
    first = env.reset(seed=0)
    worker_of(env).kill()
    with pytest.raises(EnvCrashed, match="its process died"):
        env.step("look")
    with pytest.raises(ResetNeeded):
        env.step("look")
    assert env.reset(seed=0) == first
    assert env.step("look")[4]["action_valid"]


def test_a_process_that_hangs_is_killed_in_time(make, monkeypatch):
    env = make(split="valid_seen")
    env.reset(seed=0)
    hanging = worker_of(env)
    os.kill(hanging.pid, signal.SIGSTOP)
    monkeypatch.setattr(module, "STEP_TIMEOUT", 0.3)
    with pytest.raises(EnvTimeout, match=r"step took longer than 0.3 s"):
        env.step("look")
    assert gone(hanging.pid)
    env.reset(seed=0)


def test_nothing_is_printed_and_nothing_is_left_behind(make, capfd):
    env = make(split="valid_seen")
    env.reset(seed=3)
    list(env.expert())
    env.step("look")
    process = worker_of(env)
    env.close()
    env.close()
    assert gone(process.pid)
    assert capfd.readouterr() == ("", "")


def test_children_end_with_the_process_that_made_them(make):
    script = (
        "import agentkit, time; env = agentkit.make('AlfWorld-v0', split='valid_seen'); env.reset(seed=0); "
        "print(env._worker.pid, flush=True); time.sleep(600)"
    )
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        server = worker.parent()
        parent.kill()
    assert server is not None
    assert gone(worker.pid)
    assert gone(server.pid)


def test_threads_play_side_by_side(make):
    alone = make(split="valid_seen")
    expected = {seed: play(alone, ["look", "inventory"], seed=seed) for seed in range(4)}
    played = {}

    def work(seed):
        played[seed] = play(make(split="valid_seen"), ["look", "inventory"], seed=seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert played == expected


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sixteen_play_at_once_quickly_and_without_an_error(make):
    envs = [make(split="valid_seen") for _ in range(16)]
    resets: list[float] = []

    def work(number):
        rng = np.random.default_rng(number)
        for seed in range(number, number + 3 * 16, 16):
            start = time.perf_counter()
            _, info = envs[number].reset(seed=seed)
            resets.append(time.perf_counter() - start)
            for _ in range(10):
                info = envs[number].step(str(rng.choice(info["admissible_actions"])))[4]
                if info["won"]:
                    break

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    assert len(resets) == 48
    # Sixteen share what cores there are: what one alone takes is asked for below.
    alone = make(split="valid_seen")
    alone.reset(seed=0)
    start = time.process_time()
    quick = min(_seconds(lambda seed=seed: alone.reset(seed=seed)) for seed in range(6))
    assert quick < 0.3
    assert min(_seconds(lambda: alone.step("look")) for _ in range(6)) < 0.08
    assert time.process_time() - start < 1.0  # the work is done in the other process


def _seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
