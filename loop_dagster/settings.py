"""Where an installation keeps things and how it is reached, read from the environment and `settings.yaml`.

Belongs here: bounded, typed settings of one installation (LOOP_*), and the paths derived from LOOP_HOME.
Does not belong here: anything of a pipeline (that is in the registry), anything read at import.
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from loop_dagster.rules.money import PRICE_DECIMALS, SCORING_CENTS


class Upstream(BaseModel):
    """A server that answers for models: where it is, its key, and how it wants to be shown the key.

    `url` is the base that its own clients take, as in `https://api.openai.com/v1`; one without a path gets `/v1`.
    `openai` shows the key as a bearer token, as vLLM and every compatible server takes it; `anthropic` in `x-api-key`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    url: str
    api_key: SecretStr | None = None
    kind: Literal["openai", "anthropic"] = "openai"

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        clean = url.strip().rstrip("/")
        parts = urlsplit(clean)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("an upstream's url is the base of its API, as in https://api.openai.com/v1")
        if parts.username or parts.password:
            raise ValueError("an upstream's key belongs into api_key, not into its url")
        return clean if parts.path else f"{clean}/v1"


class Settings(BaseSettings):
    """Settings of one installation. Every field can be set as `LOOP_<FIELD>`, which wins over the file.

    `home` holds everything of an installation that `registry_url`, `lake_url` and `dagster_postgres_url` do not move.
    """

    model_config = SettingsConfigDict(
        env_prefix="LOOP_", extra="forbid", validate_default=True, hide_input_in_errors=True
    )

    home: Path = Field(default=Path(".loop"), description="folder that holds all state of this installation")
    workspace: str = Field(default="default", pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")
    registry_url: str | None = Field(default=None, description="SQLAlchemy URL; SQLite under home when unset")
    lake_url: str | None = Field(default=None, description="folder, s3://, gs:// or az://; under home when unset")
    dagster_postgres_url: SecretStr | None = Field(default=None, description="Dagster's own storage; SQLite when unset")
    intake_dir: Path | None = Field(
        default=None, description="folder watched for files to import; home/intake when unset"
    )

    judge: str = Field(
        default="reference", description="`reference` (embedded), `openai` (any compatible server) or `module:factory`"
    )
    judge_url: str | None = None
    judge_model: str | None = None
    judge_api_key: SecretStr | None = None
    judge_concurrency: int = Field(default=32, ge=1, le=256, description="calls to the judge's server at once")
    judge_timeout_s: float = Field(default=120.0, ge=1, le=3_600, description="seconds for one call to the judge")
    judge_max_tokens: int = Field(default=2_048, ge=64, le=32_768, description="tokens of a verdict with its reasoning")
    judge_input_cents_per_million: Decimal = Field(
        default=Decimal(0), ge=0, le=10**6, decimal_places=PRICE_DECIMALS, description="price of what the judge reads"
    )
    judge_output_cents_per_million: Decimal = Field(
        default=Decimal(0), ge=0, le=10**6, decimal_places=PRICE_DECIMALS, description="price of what the judge writes"
    )
    scoring_limit_cents: int = Field(
        default=SCORING_CENTS, ge=0, le=10**7, description="the most that scoring one attempt may cost"
    )

    max_training_length: int = Field(default=32_768, ge=64, le=32_768, description="tokens; the model's limit if lower")
    max_answer_tokens: int = Field(default=512, ge=8, le=8_192, description="per answer in tests, both models alike")

    webserver_port: int = Field(default=3000, ge=1, le=65_535)
    serve_host: str = "127.0.0.1"
    serve_port: int = Field(default=8766, ge=1, le=65_535, description="the engine that answers for live versions")
    api_host: str = "127.0.0.1"
    api_port: int = Field(default=8765, ge=1, le=65_535, description="the HTTP API")

    upstreams: Annotated[dict[str, Upstream], NoDecode] = Field(
        default_factory=dict,
        description="the gateway: model, or pattern with `*`, and the server that answers for it (docs/gateway.md)",
    )
    gateway_timeout_s: float = Field(
        default=600.0, ge=1, le=86_400, description="seconds that an upstream may be silent before a call is given up"
    )
    gateway_wait_ms: float = Field(
        default=100.0, ge=0, le=10_000, description="the longest that an answer waits for its sample id"
    )

    drain_rows: int = Field(default=5_000, ge=1)
    drain_age_s: float = Field(default=60.0, gt=0)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        given: dict[str, Any] = {**env_settings(), **init_settings()}
        home = Path(given.get("home", ".loop"))
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls, yaml_file=home / "settings.yaml")

    @field_validator("upstreams", mode="before")
    @classmethod
    def _read(cls, upstreams: object) -> object:
        if not isinstance(upstreams, str):
            return upstreams
        try:
            return json.loads(upstreams)
        except ValueError as error:
            raise ValueError(f"it is not JSON: {str(error).partition(':')[0]}") from None

    @field_validator("upstreams")
    @classmethod
    def _names(cls, upstreams: dict[str, Upstream]) -> dict[str, Upstream]:
        for name in upstreams:
            if not name.strip() or name.startswith("loop-"):
                raise ValueError("upstreams are named by models; names that begin with loop- are the live versions'")
        return upstreams

    @property
    def root(self) -> Path:
        """Absolute LOOP_HOME."""
        return self.home.expanduser().resolve()

    @property
    def registry(self) -> str:
        return self.registry_url or f"sqlite:///{self.root / 'registry.db'}"

    @property
    def lake(self) -> str:
        return self.lake_url or str(self.root / "lake")

    @property
    def intake(self) -> Path:
        return (self.intake_dir or self.root / "intake").expanduser().resolve()

    @property
    def artifacts(self) -> Path:
        return self.root / "artifacts"

    @property
    def models_dir(self) -> Path:
        """Base models converted or downloaded by this installation."""
        return self.root / "models"

    @property
    def work(self) -> Path:
        """Private folders of running steps."""
        return self.root / "work"

    @property
    def dagster_home(self) -> Path:
        return self.root / "dagster"
