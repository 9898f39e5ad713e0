"""Sessions in the REST client: details, lists and search."""

from __future__ import annotations

import pytest
import tinker
from engine_process import API_KEY
from tinker import types


@pytest.fixture
def rest(engine_url: str) -> tinker.RestClient:
    return tinker.RestClient(base_url=engine_url, api_key=API_KEY)


def test_session_lists_its_runs_and_samplers(engine_url: str, rest: tinker.RestClient) -> None:
    with tinker.ServiceClient({"a": "b"}, display_name="Ann's", base_url=engine_url, api_key=API_KEY) as service:
        trainer = service.create_lora_training_client(base_model="tiny", rank=1).result()
        service.create_sampling_client(base_model="tiny").result()
        session_id = service.holder.get_session_id()
        details = rest.get_session(session_id).result()
        assert details.training_run_ids == [trainer.model_id]
        (sampler_id,) = details.sampler_ids
        assert rest.get_sampler(sampler_id).result().sampler_id == sampler_id
        assert (details.user_metadata, details.display_name) == ({"a": "b"}, "Ann's")
        assert session_id in rest.list_sessions(limit=1000).result().sessions
    assert rest.get_session(session_id).result() == details
    with pytest.raises(tinker.NotFoundError, match="There is no session"):
        rest.get_session("nobody").result()


@pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning")
def test_session_search(engine_url: str, rest: tinker.RestClient) -> None:
    for name in ("red one", "red two", "blue"):
        with tinker.ServiceClient(display_name=name, base_url=engine_url, api_key=API_KEY) as service:
            assert service.holder.get_session_id()
    request = types.SessionSearchRequest(display_name="RED", limit=1)
    first = rest.search_sessions(request).result()
    second = rest.search_sessions(request.model_copy(update={"cursor": first.next_cursor})).result()
    assert [page.sessions[0].display_name for page in (first, second)] == ["red two", "red one"]
    assert second.next_cursor is None
    status = first.sessions[0].status
    assert isinstance(status, types.ClientSessionFinished)
    assert status.reason.type == "success"


@pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning")
def test_search_matches_any_listed_status_in_any_order(engine_url: str, rest: tinker.RestClient) -> None:
    finished, active = types.ClientFinishedSessionStatusQuery(), types.ActiveSessionStatusQuery()
    with tinker.ServiceClient(display_name="in any order", base_url=engine_url, api_key=API_KEY) as service:
        session_id = service.holder.get_session_id()
        for statuses in ([active, finished], [finished, active]):
            request = types.SessionSearchRequest(session_id=session_id, statuses=statuses)
            assert [session.session_id for session in rest.search_sessions(request).result().sessions] == [session_id]
