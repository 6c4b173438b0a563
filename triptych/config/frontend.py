"""All settings of a frontend."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from triptych.config.admission import AdmissionConfig
from triptych.config.engines import EnginesConfig
from triptych.config.http import HttpConfig
from triptych.config.media import MediaConfig, MediaFetchConfig
from triptych.config.responses import ResponsesConfig
from triptych.config.security import AuthConfig, CorsConfig, TlsConfig
from triptych.errors import ConfigError


@dataclass(frozen=True)
class FrontendConfig:
    """The groups of settings that a frontend needs."""

    http: HttpConfig = field(default_factory=HttpConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    fetch: MediaFetchConfig = field(default_factory=MediaFetchConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    cors: CorsConfig = field(default_factory=CorsConfig)
    responses: ResponsesConfig = field(default_factory=ResponsesConfig)
    engines: EnginesConfig = field(default_factory=EnginesConfig)

    @classmethod
    def of(cls, **settings: Any) -> "FrontendConfig":
        """Return the defaults with these settings, by their own names. Raises ConfigError, and TypeError for a name
        that no group has."""
        return cls().having(settings)

    def having(self, settings: Mapping[str, Any]) -> "FrontendConfig":
        """Return a copy with these settings, by their own names. Raises ConfigError, and TypeError for a name that no
        group has."""
        groups, left = {}, dict(settings)
        for item in fields(self):
            group = getattr(self, item.name)
            own = {setting.name: left.pop(setting.name) for setting in fields(group) if setting.name in left}
            groups[item.name] = replace(group, **own)
        if left:
            raise TypeError(f"no group of the frontend's settings has {', '.join(left)}")
        return FrontendConfig(**groups)

    def __post_init__(self) -> None:
        """Raise ConfigError when one client may not hold what one request may have: its body, and its media."""
        body, media = self.http.max_body_mb, self.media.max_media_mb
        if not self.fetch.fetches:
            media = min(media, body)  # all of it comes in the body
        if self.admission.max_inflight_mb < 2 * (body + media):
            raise ConfigError(
                f"--max-inflight-mb {self.admission.max_inflight_mb} is too small: one client may use half of it, one "
                f"request may take {body + media} MiB (--max-body-mb {body}, and {media} MiB of media)"
            )
