"""Declaring the chat command: a call outside any queue, retried a little."""

import pytest

from harness.ai_server import AIServer, Drop, Reply
from studyhall.cli_chat import register
from studyhall.patterns.core.errors import Permanent


async def test_a_shaky_platform_is_asked_again_and_a_refusal_is_told():
    async with AIServer() as platform:
        platform.will(Reply(503), Drop(), Reply(429, headers={"retry-after": "0.1"}), Reply(200, []))
        await register(platform.url, "app-1", "bot-token")
        assert len(platform.requests) == 4
        assert platform.requests[0].path == "/applications/app-1/commands"
        platform.will(Reply(401))
        with pytest.raises(Permanent, match="check the id and the token") as refused:
            await register(platform.url, "app-1", "bot-token")
        assert "bot-token" not in str(refused.value)
        assert len(platform.requests) == 5
