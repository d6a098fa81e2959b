"""Settings of one engine (driver and workers) and of a Serve deployment of it."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from configs.base import ConfigError, Settings, explain

PAGE_SIZE = 64  # positions a page; kernels and the index-key layout rely on it
MAX_DRAFT_TOKENS = 15


class ParallelConfig(Settings):
    """How a model is split over workers. Every rank sees every row; experts are split by expert over `ep_size`
    groups of `tp_size / ep_size` ranks, and inside a group by their intermediate width."""

    tp_size: int = Field(default=1, ge=1, description="ranks, one device each")
    ep_size: int = Field(default=1, ge=1, description="expert partitions; divides tp_size")

    @model_validator(mode="after")
    def _divides(self) -> "ParallelConfig":
        if self.tp_size % self.ep_size:
            raise ValueError(
                f"ep_size ({self.ep_size}) must divide tp_size ({self.tp_size}): "
                f"use ep_size 1 (experts split inside) or ep_size {self.tp_size} (experts whole on a rank)"
            )
        return self


class EngineConfig(Settings):
    """Everything an engine needs to start."""

    model: Path = Field(description="folder of a Hugging Face checkpoint")
    parallel: ParallelConfig = ParallelConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    load_format: Literal["safetensors", "dummy"] = Field(
        default="safetensors", description="dummy = random weights from config.json alone, to measure speed"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="compute type; auto = the checkpoint's on a GPU, float32 on a CPU"
    )
    max_model_len: int | None = Field(default=None, ge=1, description="prompt + output tokens; default from the model")
    max_num_seqs: int = Field(default=64, ge=1, le=4096, description="slots: sequences that run at a time")
    max_num_batched_tokens: int = Field(default=1024, ge=1, description="rows of one step, prefill and decode together")
    kv_cache_memory_fraction: float = Field(
        default=0.9, gt=0.0, lt=1.0, description="GPU: share of the device's memory that weights and cache may take"
    )
    kv_cache_bytes: int | None = Field(
        default=None, ge=1, description="KV cache of a rank; default: from the fraction on a GPU, 512 MiB on a CPU"
    )
    enable_prefix_caching: bool = True
    cuda_graphs: bool = Field(
        default=True, description="GPU: replay captured decode steps; off = launch every kernel, for debugging"
    )
    max_inflight_steps: Literal[1, 2] = Field(default=2, description="2 = plan step N+1 while step N runs")
    attention_backend: Literal["auto", "torch", "triton", "flashinfer_fa3", "trtllm_gen"] = Field(
        default="auto",
        description="auto = the fastest measured: FlashInfer's FA3 kernel on Hopper in bfloat16, else Triton's; "
        "trtllm_gen = FlashInfer's for Blackwell, not run yet",
    )
    moe_backend: Literal["auto", "torch", "triton"] = "auto"
    kernel_backend: Literal["auto", "torch", "triton"] = Field(
        default="auto", description="norms, rotations, routing and the like between matmuls"
    )
    topk_backend: Literal["auto", "torch", "flashinfer", "flashinfer_unfused"] = Field(
        default="auto", description="sparse attention: who selects positions from the indexer's scores"
    )
    topk_deterministic: bool = Field(
        default=True, description="positions are listed in order, the same on every run; torch always does"
    )
    topk_tie_break: Literal["none", "small", "large"] = Field(
        default="small", description="which of equally scored positions are kept: any, the first or the last"
    )
    topk_exchange: Literal["replicated", "leader", "sharded"] = Field(
        default="replicated",
        description="sparse attention over several ranks: every rank selects for all rows, rank 0 selects and "
        "broadcasts, or each rank selects for its share of the rows",
    )
    index_cache_dtype: Literal["auto", "fp8"] = Field(
        default="auto", description="index keys of sparse attention; auto = the compute type, fp8 = e4m3 with a scale"
    )
    num_draft_tokens: int = Field(
        default=0,
        ge=0,
        le=MAX_DRAFT_TOKENS,
        description="speculation: tokens that the MTP module drafts a step at most",
    )
    draft_policy: Literal["adaptive", "fixed"] = Field(
        default="adaptive", description="adaptive = draft as many as measured times and acceptance make worth while"
    )
    seed: int | None = Field(default=None, description="seeds requests that bring no seed, so that a run repeats")
    cpu_threads: int | None = Field(default=None, ge=1, description="threads of a CPU worker; default cores / tp_size")
    step_timeout_s: float = Field(default=120.0, gt=0, description="a step that takes longer fails the engine")
    start_timeout_s: float = Field(default=1800.0, gt=0, description="from start to every worker ready")

    @field_validator("model")
    @classmethod
    def _is_checkpoint(cls, value: Path) -> Path:
        value = value.expanduser()
        if not value.is_dir():
            raise ValueError(f"{value} is not a folder: give the folder that holds config.json and *.safetensors")
        if not (value / "config.json").is_file():
            raise ValueError(f"{value} has no config.json: give the folder of a Hugging Face checkpoint")
        return value.resolve()

    @model_validator(mode="after")
    def _a_sequence_fits_a_step(self) -> "EngineConfig":
        if self.num_draft_tokens >= self.max_num_batched_tokens:
            raise ValueError(
                f"num_draft_tokens ({self.num_draft_tokens}) and the token they follow do not fit a step of "
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) rows: raise it, or draft fewer"
            )
        return self

    @model_validator(mode="after")
    def _kernels_have_a_gpu(self) -> "EngineConfig":
        if self.device == "cpu":
            for setting in ("topk_backend", "attention_backend", "moe_backend", "kernel_backend"):
                if (value := getattr(self, setting)) not in ("auto", "torch"):
                    raise ValueError(f"{setting} {value!r} needs a GPU, and device is cpu: use 'auto' or 'torch'")
        return self

    @model_validator(mode="after")
    def _ranks_select_alike(self) -> "EngineConfig":
        alike = self.topk_deterministic and self.topk_tie_break != "none"
        if self.parallel.tp_size > 1 and self.topk_exchange == "replicated" and not alike:
            raise ValueError(
                "topk_exchange replicated lets every rank select for itself, which needs topk_deterministic and a "
                "topk_tie_break of small or large: set those, or use topk_exchange leader or sharded"
            )
        return self


class DeploymentConfig(Settings):
    """How Ray Serve runs replicas of the engine. Defaults fit an LLM, not a web page."""

    num_replicas: int = Field(default=1, ge=1)
    max_ongoing_requests: int = Field(default=1024, ge=1, description="requests a replica accepts at a time")
    max_queued_requests: int = Field(default=-1, ge=-1, description="beyond them, per caller; -1 = no limit")
    health_check_period_s: float = Field(default=1.0, gt=0)
    health_check_timeout_s: float = Field(default=10.0, gt=0)
    graceful_shutdown_timeout_s: float = Field(default=600.0, ge=0, description="longest stream that may finish")
    cpus_per_replica: float = Field(default=1.0, gt=0, description="Ray's CPUs for the front end and its driver")
    cpus_per_worker: float = Field(default=1.0, gt=0, description="Ray's CPUs for each rank, beside its GPU if any")
    placement_group_strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"


class AdmissionConfig(Settings):
    """What may wait in a replica; a request beyond it gets a 429 at once. Sequences are counted: a prompt with n
    answers is n of them."""

    max_waiting_sequences: int | None = Field(default=None, ge=0, description="beyond max_num_seqs; default: no bound")
    max_waiting_tokens: int | None = Field(
        default=None, ge=1, description="of prompts that have no answer yet; default: no bound"
    )


class ServeConfig(Settings):
    """The `args:` of a Serve application (`import_path: serve.app:build`)."""

    engine: EngineConfig
    served_model_name: str | None = Field(default=None, min_length=1, description="default: the folder's name")
    api_key_file: Path | None = Field(
        default=None,
        description="keys that clients must send, one a line; none, and no SHOAL_API_KEYS = anyone may ask",
    )
    tool_call_parser: Literal[
        "auto", "none", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "glm", "kimi_k2"
    ] = Field(default="auto", description="how the model writes tool calls; auto = as its chat template says")
    reasoning_parser: Literal["auto", "none", "think"] = Field(
        default="auto", description="think = text in <think> tags is reasoning, as with auto; none = it is content"
    )
    admission: AdmissionConfig = AdmissionConfig()
    health_stall_s: float = Field(
        default=60.0, gt=0, description="/health answers 503 when requests are pending and no step ended for so long"
    )
    request_timeout_s: float | None = Field(
        default=None, gt=0, description="longest time of a request, streams included; default: no limit"
    )
    sse_keep_alive_s: float = Field(
        default=15.0, gt=0, description="streams send a comment when there was nothing to tell for so long"
    )
    cors_allow_origins: list[str] = Field(
        default=[], description="origins whose pages may send requests, e.g. https://chat.example.com; * = all"
    )
    deployment: DeploymentConfig = DeploymentConfig()

    @model_validator(mode="after")
    def _the_bound_is_reached(self) -> "ServeConfig":
        bound, held = self.max_sequences, self.deployment.max_ongoing_requests
        if bound is not None and bound >= held:
            raise ValueError(
                f"admission.max_waiting_sequences is never reached: with engine.max_num_seqs it allows {bound} "
                f"sequences, and Serve holds back all beyond {held} requests: raise deployment.max_ongoing_requests"
            )
        return self

    @property
    def max_sequences(self) -> int | None:
        """In a replica, running and waiting; None = no bound."""
        waiting = self.admission.max_waiting_sequences
        return None if waiting is None else self.engine.max_num_seqs + waiting

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.engine.model.name

    @classmethod
    def from_args(cls, args: dict[str, Any]) -> "ServeConfig":
        """Validates; raises ConfigError with one line for each problem."""
        try:
            return cls.model_validate(args)
        except ValidationError as error:
            raise ConfigError(explain(error, where="args")) from None
