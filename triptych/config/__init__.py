"""Every setting, as frozen dataclasses by concern. A field's name determines its flag (``max_num_seqs`` ↔
``--max-num-seqs``), its environment variable (``TRIPTYCH_MAX_NUM_SEQS``) and its key in a file. ``cli/flags.py`` maps
them onto the field."""

from triptych.config.addresses import host_and_port, is_loopback, is_unspecified, split_addresses
from triptych.config.admission import AdmissionConfig
from triptych.config.cache_folder import CacheFolder
from triptych.config.changes import changed
from triptych.config.cluster import ClusterConfig
from triptych.config.cpu_set import CpuSet
from triptych.config.encode import EncodeConfig
from triptych.config.engine import DTYPES, ENCODER_QUANTIZATIONS, KV_CACHE_DTYPES, QUANTIZATIONS, EngineConfig
from triptych.config.engines import EnginesConfig
from triptych.config.frontend import FrontendConfig
from triptych.config.frontend_spec import FrontendSpec
from triptych.config.http import HttpConfig
from triptych.config.instance_spec import InstanceSpec
from triptych.config.item_limits import ItemLimits
from triptych.config.lease import LeaseConfig
from triptych.config.media import MAX_FILE_MB, MAX_MESSAGE_BYTES, MediaConfig, MediaFetchConfig
from triptych.config.memory_size import MemorySize
from triptych.config.observe import LOG_FORMATS, ObserveConfig
from triptych.config.rank_sizes import RankSizes
from triptych.config.responses import ResponsesConfig
from triptych.config.security import AuthConfig, CorsConfig, TlsConfig
from triptych.config.service import ServeConfig
from triptych.config.settings import Settings, check_value, flag, names_of, public_fields, setting, spellings
from triptych.config.transfer import FABRICS, TransferConfig
from triptych.config.values import parse_value

CONFIG_GROUPS: tuple[type[Settings], ...] = (
    HttpConfig,
    AdmissionConfig,
    MediaConfig,
    MediaFetchConfig,
    AuthConfig,
    TlsConfig,
    CorsConfig,
    ResponsesConfig,
    EnginesConfig,
    EngineConfig,
    EncodeConfig,
    TransferConfig,
    LeaseConfig,
    ClusterConfig,
    ObserveConfig,
)
"""All groups of settings, in the order of ``--help`` and the documentation. The first line of each docstring is its
title."""

__all__ = [
    "CONFIG_GROUPS",
    "DTYPES",
    "ENCODER_QUANTIZATIONS",
    "FABRICS",
    "KV_CACHE_DTYPES",
    "LOG_FORMATS",
    "MAX_FILE_MB",
    "MAX_MESSAGE_BYTES",
    "QUANTIZATIONS",
    "AdmissionConfig",
    "AuthConfig",
    "CacheFolder",
    "ClusterConfig",
    "CorsConfig",
    "CpuSet",
    "EncodeConfig",
    "EngineConfig",
    "EnginesConfig",
    "FrontendConfig",
    "FrontendSpec",
    "HttpConfig",
    "InstanceSpec",
    "ItemLimits",
    "LeaseConfig",
    "MediaConfig",
    "MediaFetchConfig",
    "MemorySize",
    "ObserveConfig",
    "RankSizes",
    "ResponsesConfig",
    "ServeConfig",
    "Settings",
    "TlsConfig",
    "TransferConfig",
    "changed",
    "check_value",
    "flag",
    "host_and_port",
    "is_loopback",
    "is_unspecified",
    "names_of",
    "parse_value",
    "public_fields",
    "setting",
    "spellings",
    "split_addresses",
]
