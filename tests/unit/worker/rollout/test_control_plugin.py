"""Routes of SGLang's server that tell its keys need the key of the control routes."""

import pytest
from fastapi import FastAPI
from sglang.srt.utils import auth
from starlette.testclient import TestClient

from grpo_worker.rollout.sglang import control_plugin

ADMIN, USER = "of-control-routes", "of-users"


@pytest.mark.parametrize("users", [USER, None], ids=["with users", "of a job"])
def test_the_arguments_of_the_server_are_for_the_agent_only(users: str | None) -> None:
    app = FastAPI()

    @app.get("/server_info")
    def server_info() -> dict[str, str]:
        return {"admin_api_key": ADMIN}

    @app.get("/model_info")
    def model_info() -> dict[str, str]:
        return {"weight_version": "0"}

    control_plugin._also_guard(auth.add_api_key_middleware, app, api_key=users, admin_api_key=ADMIN)
    with TestClient(app) as client:

        def status(path: str, key: str | None) -> int:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return int(client.get(path, headers=headers).status_code)

        assert [status("/server_info", key) for key in (ADMIN, USER, None)] == [200, 401, 401]
        assert status("/model_info", USER) == 200, "other routes are as before"
        assert (status("/model_info", None) == 200) == (users is None)
