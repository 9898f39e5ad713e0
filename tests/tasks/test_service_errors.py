"""What becomes of an answer that is not the service's own, through the real SDK."""

from __future__ import annotations

import pytest
import tinker
from chaos.proxy import Proxies, Proxy
from chaos.schedule import Fault
from tinker import types

from blocks.errors import ServiceLostError
from blocks.processes import free_port
from tasks.answer import wait_for_answer


@pytest.mark.parametrize("path", ["/api/v1/optim_step", "/api/v1/retrieve_future"])
def test_a_page_from_the_way_is_got_over_with_a_new_client(engine_url: str, path: str) -> None:
    """As of a portal that answers with 200: the SDK cannot know whether the service did what was asked."""
    proxy = Proxy(free_port(), int(engine_url.rpartition(":")[2]))
    with Proxies({"engine": proxy}):
        service = tinker.ServiceClient(base_url=f"http://127.0.0.1:{proxy.port}", api_key="tml-test")
        client = service.create_lora_training_client("tiny", rank=4).result()
        proxy.arm(Fault(0, 0.0, "engine", "garbage", 0, 0.0), path)
        with pytest.raises(ServiceLostError, match="could not step"):
            wait_for_answer(client.optim_step(types.AdamParams()), "step")
        service.holder.close()
