"""Settings of `experiments.dqn`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import optax

import shardjax as sj
from experiments.checkpoints import CheckpointConfig, check_resume
from experiments.storage import AdmitConfig, StorageConfig, refuse_idle
from shardjax import embed, rl, zero

RECSIM = "recsim"  # the environment that is none of Gymnasium's
ACCUMULATOR = 1e-4  # of Adagrad


@dataclass(frozen=True, kw_only=True)
class RecSimConfig:
    """The recommender of --env recsim, and its embedding tables."""

    users: int = 100_000
    """How many users there are."""
    items: int = 100_000
    """How many items there are."""
    slate: int = 10
    """Candidates to choose from at each step."""
    dim: int = 16
    """Numbers per row of the tables of users and of items."""
    rows: Literal["rowwise_adagrad", "adagrad", "adam", "sgd"] = "adagrad"
    """Optimizer of the rows; a step moves only the rows it uses."""
    rows_lr: float = 0.03
    """Its learning rate."""
    rows_accumulator: float = ACCUMULATOR
    """What the sums of squares of Adagrad begin with. The larger, the less the first uses of
    a row move it: with many rare items the best of a slate is else one known too little."""

    def __post_init__(self):
        for name in ("users", "items", "slate", "dim"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be positive, got {getattr(self, name)}"
                )
        if self.dim < 2:
            raise ValueError(
                "`dim` must be at least 2, a number of its own and a vector, got"
                f" {self.dim}"
            )
        if not self.rows_lr >= 0:
            raise ValueError(f"`rows_lr` must not be negative, got {self.rows_lr}")
        if not self.rows_accumulator > 0:
            raise ValueError(
                f"`rows_accumulator` must be positive, got {self.rows_accumulator}"
            )
        if "adagrad" not in self.rows and self.rows_accumulator != ACCUMULATOR:
            raise ValueError(
                f"`rows_accumulator` has no effect with `rows` {self.rows}. Leave it out"
            )

    def envs(self, num_envs: int) -> rl.RecSim:
        """Sessions of the recommender, all of one world."""
        return rl.RecSim(num_envs, users=self.users, items=self.items, slate=self.slate)

    def row_optimizer(self) -> optax.GradientTransformation:
        """Of users and items."""
        if self.rows == "rowwise_adagrad":
            return embed.rowwise_adagrad(
                self.rows_lr, initial_accumulator=self.rows_accumulator
            )
        if self.rows == "adagrad":
            return optax.adagrad(
                self.rows_lr, initial_accumulator_value=self.rows_accumulator
            )
        return (optax.adam if self.rows == "adam" else optax.sgd)(self.rows_lr)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    env: str = "CartPole-v1"
    """An environment of Gymnasium, with observations that are vectors and numbered actions; or
    recsim, a recommender whose users and items lie in embedding tables."""
    recsim: RecSimConfig = field(default_factory=RecSimConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    admit: AdmitConfig = field(default_factory=AdmitConfig)
    mesh: str = "1x1"
    """Devices along data x model, such as 8x1; a CPU host simulates those it lacks. Batches
    and ZeRO are over data."""
    zero: int = 0
    """ZeRO stage: 1 splits the optimizer's state over the devices, 2 the gradients too, 3
    the parameters and their target too; 0 nothing."""
    seed: int = 0
    """Of the first parameters, the environments, exploration and the replay's draws."""
    steps: int = 50_000
    """Steps of all environments together. Calls that only begin an episode count too."""
    num_envs: int = 8
    """Environments that take their steps together."""
    layers: tuple[int, ...] = (256, 256)
    """Widths of the network's layers."""
    dueling: bool = False
    """The state has a value of its own, and actions have advantages."""
    double: bool = True
    """The network chooses the action that its target evaluates."""
    discount: float = 0.99
    """What a reward a step later is worth."""
    n_step: int = 3
    """Steps of an item: the rewards that it has before the target's estimate."""
    lr: float = 2.3e-3
    """Learning rate of Adam at the start; it falls linearly."""
    lr_final: float = 0.0
    """What it ends with, as a share."""
    clip: float = 10.0
    """The gradient of all parameters is scaled down to this norm; 0 for not."""
    batch_size: int = 64
    """Items per update, over all devices."""
    train_every: int = 256
    """Steps of the environments between updates."""
    updates: int = 128
    """Updates then."""
    updates_per_call: int = 32
    """Of those, taken in one program; their batches are drawn at once, and priorities set
    after them."""
    learning_starts: int = 1000
    """Steps before the first update."""
    target: Literal["hard", "polyak"] = "hard"
    """The target network is copied every --target-every updates, or follows by --tau."""
    target_every: int = 256
    """Updates between copies."""
    tau: float = 0.01
    """Share of the way to the parameters that the target moves in each update."""
    replay: Literal["uniform", "proportional", "rank"] = "uniform"
    """How items are drawn: all alike, or by priority (Schaul et al. 2016)."""
    capacity: int = 100_000
    """Items in the replay."""
    alpha: float | None = None
    """How much priorities count; without it 0.6, and 0.7 for ranks."""
    beta: float = 0.4
    """Exponent of the importance weights at the start; it rises to 1 over the run."""
    epsilon: float = 1.0
    """Share of random actions at the start."""
    epsilon_final: float = 0.04
    """What it falls to."""
    epsilon_fraction: float = 0.16
    """Share of the run in which it falls."""
    eval_every: int = 2560
    """Steps between evaluations."""
    keep: Literal["best", "last"] | None = None
    """The parameters whose episodes are the result: of the best evaluation, and of those as
    good the latest (also without it), or the last ones; in recsim always those."""
    eval_episodes: int = 20
    """Episodes of an evaluation, without random actions."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: str = "auto"
    """What to go on from in --checkpoint.dir: auto (the newest, if there is one), none, or the
    number of a round. Learner, replay and exploration go on as they were, and recsim too;
    environments of Gymnasium begin new episodes."""
    out: Path | None = None
    """Folder for the config, metrics.jsonl, TensorBoard events and curves.png."""

    def __post_init__(self):
        shape = sj.MeshShape.parse(self.mesh)
        for name in (
            *("steps", "num_envs", "n_step", "batch_size", "train_every", "updates"),
            *("updates_per_call", "capacity", "eval_every", "eval_episodes"),
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be positive, got {getattr(self, name)}"
                )
        if not self.layers or min(self.layers) < 1:
            raise ValueError(f"`layers` must be positive widths, got {self.layers}")
        for name in ("lr", "clip", "learning_starts", "beta"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"`{name}` must not be negative, got {getattr(self, name)}"
                )
        for name in (
            *("discount", "lr_final", "beta"),
            *("epsilon", "epsilon_final", "epsilon_fraction"),
        ):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"`{name}` must lie in [0, 1], got {getattr(self, name)}"
                )
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"`seed` must be in [0, 2**31), got {self.seed}")
        if self.zero not in zero.STAGES:
            raise ValueError(f"`zero` must be one of {zero.STAGES}, got {self.zero}")
        multiples = (
            ("batch_size", shape.data, "devices along data"),
            ("train_every", self.num_envs, "`num_envs`"),
            ("updates", self.updates_per_call, "`updates_per_call`"),
        )
        for name, of, what in multiples:
            if getattr(self, name) % of:
                raise ValueError(
                    f"`{name}` must be a multiple of the {of} {what}, got"
                    f" {getattr(self, name)}"
                )
        self.target_rule()
        self.sampler()
        check_resume(self.resume, self.checkpoint)
        if self.env == RECSIM:
            self._check_recsim()
        else:
            needed = f"`env` {RECSIM}"
            refuse_idle(self.checkpoint, ("full_every",), needed)
            refuse_idle(self.storage, ("device_rows",), needed)
            for name in ("recsim", "admit"):
                own = getattr(self, name)
                if own != type(own)():
                    raise ValueError(
                        f"options of `{name}` have no effect with `env` {self.env}, got"
                        f" {own}. Leave them out, or give {needed}"
                    )

    def _check_recsim(self) -> None:
        if self.keep == "best":
            raise ValueError(
                f"`keep` best would copy whole tables in `env` {RECSIM}. Leave it out, or give"
                " last"
            )
        if self.dueling:
            raise ValueError(
                f"`dueling` has no effect in `env` {RECSIM}, whose network scores one item at"
                " a time. Leave it out"
            )

    @property
    def keeps_best(self) -> bool:
        """Whether the parameters of the best evaluation are the result."""
        return self.keep != "last" and self.env != RECSIM

    def rounds(self) -> int:
        """How often the environments act and the learner learns."""
        return -(-self.steps // self.train_every)

    def total_updates(self) -> int:
        """Updates of the whole run, at least 1."""
        before = -(-self.learning_starts // self.train_every)
        return max(self.rounds() - max(before, 1) + 1, 1) * self.updates

    def target_rule(self) -> rl.TargetRule:
        """How the target follows."""
        if self.target == "hard":
            return rl.HardCopy(self.target_every)
        return rl.Polyak(self.tau)

    def sampler(self) -> rl.Sampler:
        """What the replay draws by."""
        if self.replay == "uniform":
            if self.alpha is not None:
                raise ValueError(
                    f"`alpha` {self.alpha} has no effect with `replay` uniform. Leave it out"
                )
            return rl.Uniform()
        if self.replay == "rank":
            return rl.RankBased(0.7 if self.alpha is None else self.alpha)
        return rl.Proportional(0.6 if self.alpha is None else self.alpha)
