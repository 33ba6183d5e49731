"""Rules about the Trainer: steps, processes, the models in them; `rules` runs them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from asyncrl.config.algorithm_rules import NEEDS_GROUPS
from asyncrl.config.problems import Given, Problem, Rule, warning
from asyncrl.config.schema import Config, RoleConfig


def roles(config: Config) -> dict[str, RoleConfig]:
    """Settings of the models that this run trains or asks besides the policy, by their section."""
    found: dict[str, RoleConfig] = {}
    if config.needs_reference:
        found["ref"] = config.ref
    if config.needs_critic:
        found["critic"] = config.critic
    if config.reward_model.placement == "worker":
        found["reward_model.worker"] = config.reward_model.worker
    return found


# ------------------------------------------------------------------------------------------------ steps


def _micro_batch(config: Config, given: Given) -> Iterator[Problem]:
    longest = config.data.max_prompt_length + config.rollout.response_length
    limits = {"trainer": config.trainer.ppo_max_token_len}
    limits |= {name: role.ppo_max_token_len for name, role in roles(config).items() if role.ppo_max_token_len}
    for section, limit in limits.items():
        if limit < longest:
            yield Problem(
                f"{section}.ppo_max_token_len",
                limit,
                f"one full-length trajectory of {longest} tokens would not fit a micro-batch",
                f"set it to at least {longest}, or lower data.max_prompt_length or rollout.response_length",
            )


def _steps(config: Config, given: Given) -> Iterator[Problem]:
    steps, lease, training = config.trainer.total_training_steps, config.steps_per_lease, config.trainer
    if steps is None:
        return
    if steps % lease:
        made_of = "require_batches x trigger_parameter_sync_step" if config.mode == "sync" else "require_batches"
        passes = f", in each of {training.ppo_epochs} passes (trainer.ppo_epochs)" if training.ppo_epochs > 1 else ""
        yield Problem(
            "trainer.total_training_steps",
            steps,
            f"the Trainer leases {config.async_training.require_batches} mini-batches at a time ({made_of}), one step "
            f"each{passes}, so the run cannot end at step {steps}",
            f"set it to {max(lease, steps - steps % lease)} or {steps - steps % lease + lease}, "
            f"or change async_training.require_batches",
        )
    if "trainer.total_epochs" in given:
        yield Problem(
            "trainer.total_epochs",
            training.total_epochs,
            f"trainer.total_training_steps = {steps} decides the length, so it would have no effect",
            "set trainer.total_training_steps=null, or leave this key out",
        )
    if "trainer.partial_final_batch" in given:
        yield Problem(
            "trainer.partial_final_batch",
            training.partial_final_batch,
            f"trainer.total_training_steps = {steps} is a number of whole leases, so none is left in part and it would "
            "have no effect",
            "set trainer.total_training_steps=null and trainer.total_epochs, or leave this key out",
        )
    yield from fits(config, steps)


def epoch_samples(config: Config, num_prompts: int) -> int:
    """Samples of `trainer.total_epochs` over so many prompts that are trained. With `partial_final_batch: drop` those
    that would not fill a lease are left out."""
    samples = num_prompts * config.trainer.total_epochs
    return samples - samples % config.samples_per_lease if config.trainer.partial_final_batch == "drop" else samples


def epoch_steps(config: Config, num_prompts: int) -> int:
    """Steps that `epoch_samples` takes. The last one of each pass over the last lease may have fewer samples than
    others."""
    mini_batches = math.ceil(epoch_samples(config, num_prompts) / config.trainer.ppo_mini_batch_size)
    return mini_batches * config.trainer.ppo_epochs


def too_few_prompts(config: Config, num_prompts: int) -> Problem:
    """What there is to say where `epoch_steps` is 0."""
    if num_prompts == 0:
        return Problem("data.train_files", config.data.train_files, "there is no prompt to train on", "add data")
    return Problem(
        "trainer.partial_final_batch",
        config.trainer.partial_final_batch,
        f"{num_prompts} prompts in each of {config.trainer.total_epochs} epochs do not fill a lease, which is "
        f"{config.samples_per_lease} (trainer.ppo_mini_batch_size x async_training.require_batches), so there would be "
        "no step",
        "set it to train, add data or epochs, or lower trainer.ppo_mini_batch_size",
    )


def fits(config: Config, steps: int) -> Iterator[Problem]:
    """Whether warm-ups end before a run of `steps` does, its length given or derived from the data."""
    training, critic = config.trainer, config.critic
    alone = critic.warmup_steps if config.needs_critic else 0
    if alone >= steps:
        yield Problem(
            "critic.warmup_steps",
            alone,
            f"the run has {steps} steps, in all of which only the critic would learn",
            f"set it below {steps}",
        )
    elif alone * 2 > steps:
        yield warning(
            "critic.warmup_steps",
            alone,
            f"in {alone} of the run's {steps} steps only the critic learns, and the policy in {steps - alone}",
            f"set it to {steps // 2} or less, or make the run longer",
        )
    if training.optim.warmup_steps >= steps - alone > 0:
        after = f", {alone} of them the critic's alone (critic.warmup_steps)" if alone else ""
        yield warning(
            "trainer.optim.warmup_steps",
            training.optim.warmup_steps,
            f"the run has {steps} steps{after}, so the learning rate would never reach its peak",
            f"set it below {steps - alone}",
        )
    critic_steps = steps // training.ppo_epochs * critic.ppo_epochs
    if config.needs_critic and critic.optim.warmup_steps >= critic_steps:
        yield warning(
            "critic.optim.warmup_steps",
            critic.optim.warmup_steps,
            f"the critic takes {critic_steps} steps, so its learning rate would never reach its peak",
            f"set it below {critic_steps}",
        )


def _passes(config: Config, given: Given) -> Iterator[Problem]:
    if config.trainer.ppo_epochs > 1 and config.algorithm.policy_loss == "reinforce":
        yield warning(
            "trainer.ppo_epochs",
            config.trainer.ppo_epochs,
            "algorithm.policy_loss=reinforce clips nothing, so nothing holds back the later passes over a lease",
            "set it to 1, or take algorithm.policy_loss=ppo",
        )


def _optimizer(config: Config, given: Given) -> Iterator[Problem]:
    optimizers = {"trainer": config.trainer.optim} | ({"critic": config.critic.optim} if config.needs_critic else {})
    for section, optim in optimizers.items():
        if not all(0 <= beta < 1 for beta in optim.betas):
            yield Problem(
                f"{section}.optim.betas",
                list(optim.betas),
                "AdamW's averages would diverge",
                "give two numbers in [0, 1)",
            )


# ------------------------------------------------------------------------------------------------ processes


def _dtypes(config: Config, given: Given) -> Iterator[Problem]:
    dtypes = {"trainer": (config.trainer.dtype, config.trainer.device)}
    for name, role in roles(config).items():
        if role.dtype is not None:
            dtypes[name] = (role.dtype, role.device or config.trainer.device)
    for section, (dtype, device) in dtypes.items():
        if dtype == "float16":
            yield Problem(
                f"{section}.dtype",
                dtype,
                "gradients underflow to 0 without loss scaling, which the Trainer does not do",
                "use bfloat16 (GPUs) or float32",
            )
        if device == "cpu" and dtype == "bfloat16":
            yield warning(
                f"{section}.dtype", dtype, "several times slower than float32 on CPUs without AVX-512", "use float32"
            )


def _ranks(config: Config, given: Given) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.strategy == "local" and trainer.num_workers > 1:
        yield Problem(
            "trainer.num_workers",
            trainer.num_workers,
            "trainer.strategy=local is one process; several would train models that know nothing of each other",
            "set trainer.strategy to fsdp2, fsdp or ddp, or trainer.num_workers=1",
        )
    for name, role in roles(config).items():
        number = trainer.num_workers if role.placement == "actor" else role.num_workers or trainer.num_workers
        strategy = role.strategy or trainer.strategy
        if strategy == "local" and number > 1 and (role.strategy == "local" or role.placement == "own"):
            yield Problem(
                f"{name}.strategy" if role.strategy else f"{name}.num_workers",
                role.strategy or number,
                f"strategy local is one process, and this model would be in {number}",
                f"set {name}.strategy to fsdp2, fsdp or ddp, or {name}.placement=own and {name}.num_workers=1",
            )
    data_ranks = max(1, trainer.num_workers // trainer.ulysses_sequence_parallel_size)
    rows = trainer.ppo_mini_batch_size * config.rollout.n
    if rows < data_ranks:
        yield warning(
            "trainer.num_workers",
            trainer.num_workers,
            f"a mini-batch has {rows} responses (trainer.ppo_mini_batch_size x rollout.n), so {data_ranks - rows} of "
            f"{data_ranks} ranks would compute rows that count for nothing",
            f"set it to {rows * trainer.ulysses_sequence_parallel_size} or fewer, or enlarge the mini-batch",
        )


def _sequence_parallel(config: Config, given: Given) -> Iterator[Problem]:
    """Which sizes the ranks and the model's heads allow is in `engine_checks`."""
    trainer, key = config.trainer, "trainer.ulysses_sequence_parallel_size"
    size = trainer.ulysses_sequence_parallel_size
    if size > 1 and not trainer.use_remove_padding:
        yield Problem(
            key,
            size,
            "sequences are cut over ranks in packed form, and trainer.use_remove_padding is false",
            f"set trainer.use_remove_padding=true, or {key}=1",
        )


# ------------------------------------------------------------------------------------------------ models


def _adapters(config: Config, given: Given) -> Iterator[Problem]:
    if config.model.lora_rank and config.needs_reference and config.ref.placement == "own":
        yield warning(
            "ref.placement",
            "own",
            "with LoRA the policy without its adapters is the reference already; this loads it a second time",
            "set ref.placement=actor",
        )


def _reference(config: Config, given: Given) -> Iterator[Problem]:
    algorithm = config.algorithm
    for used, key, value in (
        (algorithm.use_kl_loss, "algorithm.kl_loss_coef", algorithm.kl_loss_coef),
        (algorithm.use_kl_in_reward, "algorithm.kl_ctrl.kl_coef", algorithm.kl_ctrl.kl_coef),
    ):
        if used and value == 0:
            yield warning(
                key,
                value,
                "the reference model is asked, and what it says changes nothing",
                "set it above 0, or switch the KL off",
            )


def _reward_model(config: Config, given: Given) -> Iterator[Problem]:
    model = config.reward_model
    if model.placement != "off" and not model.path:
        yield Problem(
            "reward_model.path",
            None,
            f"reward_model.placement={model.placement} needs a model that scores",
            "give a sequence-classification model with one label, or set reward_model.placement=off",
        )
    if model.placement != "off" and model.weight == 0:
        yield warning(
            "reward_model.weight",
            0,
            "the reward model is asked, and what it says changes nothing",
            "set it to another number, or reward_model.placement=off",
        )


def _remax(config: Config, given: Given) -> Iterator[Problem]:
    if config.algorithm.adv_estimator != "remax":
        return
    if config.reward_model.placement == "worker":
        yield Problem(
            "reward_model.placement",
            "worker",
            "ReMax's greedy responses are scored where they are generated, without the Trainer's reward model, so the "
            "baseline would be of another reward",
            "set reward_model.placement=serve",
        )


def _filtering(config: Config, given: Given) -> Iterator[Problem]:
    estimator = config.algorithm.adv_estimator
    if not config.algorithm.filter_groups.enable:
        return
    if config.reward_model.placement == "worker":
        yield Problem(
            "algorithm.filter_groups.enable",
            True,
            "groups are judged when they are leased, before the Trainer's reward model has scored them: those whose "
            "responses only the model tells apart would be thrown away",
            "set reward_model.placement=serve, which scores before the lease, or this to false",
        )
    if estimator not in NEEDS_GROUPS:
        yield warning(
            "algorithm.filter_groups.enable",
            True,
            f"algorithm.adv_estimator={estimator} learns from groups of equal rewards too; they would be thrown away",
            "set it to false",
        )


RULES: tuple[Rule, ...] = (
    _micro_batch,
    _steps,
    _passes,
    _optimizer,
    _dtypes,
    _ranks,
    _sequence_parallel,
    _adapters,
    _reference,
    _reward_model,
    _remax,
    _filtering,
)
