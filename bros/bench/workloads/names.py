"""Names of workloads. Imports nothing, so that --help is quick."""

CHATS = ("lmsys", "sharegpt")
SHARED_PREFIX = ("toolbench", "embodied", "programming", "video", "loogle")
TRACES = ("azure", "mooncake", "burstgpt")
"""Files with times and lengths."""

FILES = (*TRACES, "sharegpt")
NAMES = (*CHATS, "synthetic", *SHARED_PREFIX, "multiturn", *(f"{kind}:FILE" for kind in FILES))
