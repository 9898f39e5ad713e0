"""Responses that do not come from the service, received by the real SDK."""

from __future__ import annotations

import pytest
import tinker
from chaos.proxy import Proxies, Proxy
from chaos.schedule import Fault
from tinker import types

from blocks.errors import ServiceLostError
from blocks.servers.processes import free_port
from tasks.common.service_errors import wait_for_response


@pytest.mark.parametrize("path", ["/api/v1/optim_step", "/api/v1/retrieve_future"])
def test_foreign_page_means_that_the_service_is_lost(engine_url: str, path: str) -> None:
    """A captive portal responds with 200: the SDK cannot know whether the service received the request."""
    proxy = Proxy(free_port(), int(engine_url.rpartition(":")[2]))
    with Proxies({"engine": proxy}):
        service = tinker.ServiceClient(base_url=f"http://127.0.0.1:{proxy.port}", api_key="tml-test")
        client = service.create_lora_training_client("tiny", rank=4).result()
        proxy.arm(Fault(0, 0.0, "engine", "garbage", 0, 0.0), path)
        with pytest.raises(ServiceLostError, match="could not step"):
            wait_for_response(client.optim_step(types.AdamParams()), "step")
        service.holder.close()
