"""Deep Q-learning in environments of Gymnasium.

    python -m experiments.dqn                                   CartPole-v1, 50,000 steps
    python -m experiments.dqn --target polyak --replay proportional
    python -m experiments.dqn --mesh 8x1 --zero 3 --seed 1 --out runs/dqn
    python -m experiments.dqn --config experiments/recsim.toml  a recommender

Several environments act by turns with the updates: `train_every` steps, then `updates` of
them. Prints progress, and as the last line one JSON object with the result, of which
`eval/return_mean` is the mean return of fresh episodes without random actions: of the
parameters that did best in the evaluations during the run, which were of other episodes, or
with `--keep last` of the last ones. On a host without enough devices the mesh is simulated on
the CPU. It runs in one process.

Measured with jax 0.10.2: CartPole-v1 is solved, 500 of 500 in each of 20 fresh episodes, in all
of 15 runs: seeds 0 to 4, with hard copies, with ``--target polyak`` and with ``--replay
proportional``. In the recommender of 1000 users and items learning beats popularity, no target
and one that is never copied. See docs/rl.md.
"""

import contextlib
import json
import math
import time
from typing import Any

import jax
import numpy as np

import shardjax as sj
from experiments import config as configs
from experiments.checkpoints import Checkpoints
from experiments.dqn_config import RECSIM, Config
from experiments.dqn_state import Kept, padded, unpadded
from experiments.learners import Learner, VectorLearner
from experiments.output import (
    as_floats,
    claim,
    finite,
    open_writers,
    write_result,
)
from experiments.policies import play, references
from experiments.table_learner import TableLearner
from shardjax import rl, writers

EVALUATION, RESTART, RESULT = 1, 2, 3  # what seeds are for, besides the run itself


def main(config: Config) -> dict[str, Any]:
    """Runs the experiment.

    Args:
      config: all settings.

    Returns:
      The result: what the program prints as its last line.
    """
    sj.ensure_devices(config.mesh)
    return run(config)


def run(config: Config) -> dict[str, Any]:
    """Runs the experiment in this process, once its devices are there."""
    started = time.perf_counter()
    goes_on = claim(config)
    run = Run(config)
    checkpoints = Checkpoints(
        config, config.rounds(), collection=run.learner.collection
    )
    with (
        contextlib.closing(run.learner),
        checkpoints,
        open_writers(config.out, config, goes_on) as writer,
    ):
        with checkpoints.catch_sigterm():
            result = run.train(writer, checkpoints)
        checkpoints.end(None)
    result = {
        "experiment": "dqn",
        "env": config.env,
        "mesh": config.mesh,
        "devices": run.learner.mesh.size,
        "zero": config.zero,
        "target": config.target,
        "replay": config.replay,
        "seed": config.seed,
        **run.learner.facts(),
        **result,
        "seconds": round(time.perf_counter() - started, 2),
    }
    result = finite(result)
    if config.out is not None:
        write_result(config.out, result, run.rows, ("return", "loss"))
    return result


class Run:
    """An agent in its environments."""

    def __init__(self, config: Config):
        self.config = config
        self.rows: list[dict[str, float]] = []
        self.envs = open_envs(config, config.num_envs)
        obs = self.envs.reset(seed=config.seed)
        self.learner = make_learner(config, self.envs, obs)
        self.replay = rl.Replay(
            _example(obs),
            config.capacity,
            config.sampler(),
            seed=config.seed,
        )
        self._rng = np.random.default_rng([config.seed, 0])
        self._best = -math.inf  # of the evaluations
        self._figures: dict[str, list[float]] = {}  # of updates since the last row
        self._start(obs)

    def _start(self, obs: Any) -> None:
        """Begins with new episodes."""
        config = self.config
        self._obs = obs
        self._n_step = rl.NStep(config.n_step, config.discount, config.num_envs)
        never = np.zeros(config.num_envs, bool)
        self._n_step.add(  # nothing, so that its state has the form that it is to keep
            obs=obs,
            action=np.zeros(config.num_envs, np.int32),
            reward=np.zeros(config.num_envs, np.float32),
            next_obs=obs,
            terminated=never,
            truncated=never,
            valid=never,
        )
        self._returns = np.zeros(config.num_envs)
        self._finished: list[float] = []  # returns since the last row

    def train(self, writer: writers.Writer, checkpoints: Checkpoints) -> dict[str, Any]:
        """Acts and learns, and returns its part of the result."""
        config = self.config
        begun, kept, extra = checkpoints.begin(self._kept())
        if begun:
            self._go_on(begun, kept, extra)
        rounds, every = config.rounds(), config.train_every
        acting = learning = 0.0
        taken, updates = 0, 0
        bar = writers.ProgressBar(
            rounds,
            batch_size=every,
            show=("train/loss", "train/return_mean", "valid/return_mean"),
        )
        with bar:
            for number in range(begun + 1, rounds + 1):
                mark = time.perf_counter()
                self._act((number - 1) * every)
                acting += time.perf_counter() - mark
                taken += every
                if number * every >= config.learning_starts:
                    mark = time.perf_counter()
                    for name, values in self._learn(number / rounds).items():
                        self._figures.setdefault(name, []).extend(values)
                    learning += time.perf_counter() - mark
                    updates += config.updates
                steps = number * every
                row = {}
                evaluates = (
                    steps // config.eval_every > (steps - every) // config.eval_every
                )
                if evaluates or number == rounds:
                    row = self._row()
                    row |= self._evaluate(number) | checkpoints.figures()
                    self.rows.append({"step": steps, **row})
                    writer.write(steps, row)
                bar.write(number, row)
                if config.checkpoint.dir is not None:
                    checkpoints.after(number, self._kept(), self._extra)
        last, stats = self.rows[-1], self.replay.stats()
        if config.keeps_best:
            self.learner.choose_kept()
        seed = _seed(config.seed, RESULT, 0)
        found = self.returns(seed)
        with contextlib.closing(open_envs(config, config.eval_episodes)) as envs:
            others = references(envs, seed)
        return {
            "steps": rounds * every,
            "updates": config.total_updates(),
            **{k: v for k, v in last.items() if k.startswith("train/")},
            "valid/return_mean": last["valid/return_mean"],
            "eval/return_mean": float(found.mean()),
            "eval/return_min": float(found.min()),
            "eval/episodes": config.eval_episodes,
            **others,
            "env_steps_per_s": _rate(taken, acting + learning),
            "acting_steps_per_s": _rate(taken, acting),
            "updates_per_s": _rate(updates, learning),
            "samples_per_insert": round(stats["samples_per_insert"], 2),
            "stale_priorities": stats["stale"],
            **checkpoints.figures(),
        }

    def _act(self, steps: int) -> None:
        """Fills the replay with `train_every` steps, the first of which is number `steps`."""
        config = self.config
        until = max(1, round(config.epsilon_fraction * config.steps))
        for done in range(steps, steps + config.train_every, config.num_envs):
            epsilon = rl.linear_epsilon(
                done, start=config.epsilon, end=config.epsilon_final, steps=until
            )
            q_values = self.learner.q_values(self._obs)
            actions = rl.epsilon_greedy(q_values, epsilon, self._rng)
            step = self.envs.step(actions)
            items = self._n_step.add(
                obs=self._obs,
                action=actions.astype(np.int32),
                reward=step.reward,
                next_obs=step.next_obs,
                terminated=step.terminated,
                truncated=step.truncated,
                valid=step.valid,
            )
            self.replay.add(items)
            self._obs = step.obs
            self._returns += step.reward * step.valid
            self._finished += self._returns[step.done].tolist()
            self._returns[step.done] = 0.0

    def _learn(self, progress: float) -> dict[str, list[float]]:
        """Takes `updates` updates; returns figures of each."""
        config = self.config
        beta = config.beta + (1 - config.beta) * progress
        found: dict[str, list[float]] = {}
        for _ in range(config.updates // config.updates_per_call):
            batch = self.replay.sample(
                config.batch_size, beta=beta, groups=config.updates_per_call
            )
            td, info = self.learner.learn(batch)
            if not np.isfinite(td).all():
                raise ValueError(
                    "a TD error is not finite: lower --lr or --clip, or let the target"
                    " follow more slowly"
                )
            if config.replay != "uniform":
                self.replay.set_priorities(batch.ids, td)
            for name, values in info.items():
                found.setdefault(name, []).extend(values.tolist())
            found.setdefault("td", []).extend(td.mean(axis=1).tolist())
        self.learner.publish()
        return found

    def _row(self) -> dict[str, float]:
        """Means since the row before."""
        row = {f"train/{name}": float(np.mean(v)) for name, v in self._figures.items()}
        self._figures = {}
        row["train/episodes"] = len(self._finished)
        if self._finished:
            row["train/return_mean"] = float(np.mean(self._finished))
        self._finished = []
        return row

    def _evaluate(self, number: int) -> dict[str, float]:
        """Plays episodes after a round, and keeps parameters that were never better."""
        mean = float(self.returns(_seed(self.config.seed, EVALUATION, number)).mean())
        if mean >= self._best:
            self._best = mean
            self.learner.keep()
        return {"valid/return_mean": mean}

    def returns(self, seed: int) -> np.ndarray:
        """Returns of `eval_episodes` episodes without random actions, float64 [episodes].

        Args:
          seed: of the environments.
        """
        rng = np.random.default_rng(0)  # which draws nothing

        def choose(obs: Any) -> np.ndarray:
            return rl.epsilon_greedy(self.learner.q_values(obs), 0.0, rng)

        with contextlib.closing(
            open_envs(self.config, self.config.eval_episodes)
        ) as envs:
            return play(envs, choose, seed)

    def _kept(self) -> Kept:
        replay = padded(self.replay.state_dict(), self.config.capacity)
        learner = self.learner
        return Kept(learner.state, learner.kept, replay, learner.tables, self._acting())

    def _acting(self) -> dict[str, Any]:
        """Where the environments are, arrays; nothing of those that cannot be saved."""
        if not isinstance(self.envs, rl.RecSim):
            return {}
        envs = self.envs.state_dict()
        del envs["rng"]  # numbers too long for arrays
        steps = self._n_step.state_dict()
        return {"envs": envs, "steps": steps, "returns": self._returns.copy()}

    def _extra(self) -> dict[str, Any]:
        rows = [finite(row) for row in self.rows]
        generator = self._rng.bit_generator.state
        best = finite({"best": self._best})  # JSON has no infinity
        extra = {"rows": rows, **best, "rng": generator, "figures": self._figures}
        if isinstance(self.envs, rl.RecSim):
            extra["envs_rng"] = self.envs.state_dict()["rng"]
        return extra | {"finished": self._finished}

    def _go_on(self, number: int, kept: Kept, extra: dict[str, Any]) -> None:
        """Becomes as the run was after a round, but for environments that cannot be saved."""
        self.rows = as_floats(extra["rows"])
        self._best = -math.inf if extra["best"] is None else extra["best"]
        self._rng.bit_generator.state = extra["rng"]
        self.learner.state, self.learner.kept = kept.learner, kept.kept
        self.learner.tables = kept.tables
        self.learner.publish()
        self.replay.load_state_dict(unpadded(kept.replay))
        self._start(self.envs.reset(seed=_seed(self.config.seed, RESTART, number)))
        self._finished, self._figures = extra["finished"], extra["figures"]
        if isinstance(self.envs, rl.RecSim):
            rng = {"rng": extra["envs_rng"]}
            self._obs = self.envs.load_state_dict(kept.acting["envs"] | rng)
            self._n_step.load_state_dict(kept.acting["steps"])
            self._returns = np.array(kept.acting["returns"])


def open_envs(config: Config, num_envs: int) -> rl.VectorEnv:
    """The environments of a config."""
    if config.env == RECSIM:
        return config.recsim.envs(num_envs)
    return rl.make_gymnasium(config.env, num_envs)


def make_learner(config: Config, envs: rl.VectorEnv, obs: Any) -> Learner:
    """What learns in environments that begin with these observations.

    Raises:
      ValueError: for observations that are no vectors.
    """
    if isinstance(envs, rl.RecSim):
        return TableLearner(config, envs)
    shape, kind = np.shape(obs), np.asarray(obs).dtype.kind
    if len(shape) != 2 or kind != "f":
        raise ValueError(
            f"the observations of `env` {config.env!r} must be vectors of floats, got"
            f" {np.asarray(obs).dtype}{list(shape[1:])}"
        )
    return VectorLearner(config, shape[1], envs.num_actions)


def _example(obs: Any) -> dict[str, Any]:
    """An item of the replay, as `NStep` makes them."""
    one = jax.tree.map(lambda x: np.asarray(x[0]), obs)
    number = np.float32(0)
    return {
        "obs_tm1": one,
        "a_tm1": np.int32(0),
        "r_t": number,
        "discount_t": number,
        "obs_t": one,
    }


def _seed(seed: int, use: int, number: int) -> int:
    """A seed for environments, other than the run's own."""
    return int(np.random.SeedSequence([seed, use, number]).generate_state(1)[0] >> 1)


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 1) if count and seconds else math.nan


def from_anything(values: dict[str, Any]) -> Config:
    """A config from nested dicts; an unknown key is an error that names the nearest."""
    return configs.from_dict(Config, values)


if __name__ == "__main__":
    found = configs.run_program(main, Config, "experiments.dqn", __doc__)
    print(json.dumps(found, allow_nan=False))
