import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.requests import HTTPConnection
from fastapi.responses import HTMLResponse

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunResult, register_runtime
from agent_runtime_core.server import Caller, ServerSettings, create_app, install_error_handlers

CUSTOMER, STAFF = secrets.token_urlsafe(), secrets.token_urlsafe()  # your own login sets such cookies


class Refund(AgentRuntime):
    key = "refund"

    async def run(self, ctx: RunContext) -> RunResult:
        amount = await ctx.step("look up", lambda: 120)
        paid = await ctx.approve("pay", {"amount": amount}, schema={"type": "boolean"})
        return RunResult(final_output={"refunded": amount if paid else 0})


register_runtime(Refund())
runner = AgentRunner.open("refunds.db")


def who(request: HTTPConnection) -> Caller | None:
    session = request.cookies.get("session")
    if session == CUSTOMER:
        return Caller("ada", {"run", "result", "send"}, tenant="ada")
    if session == STAFF:
        return Caller("ben", {"read", "approve"})
    return None


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with runner:
        working = asyncio.create_task(runner.run_loop(handle_signals=False))
        yield
        runner.stop()
        await working


app = FastAPI(lifespan=lifespan)
install_error_handlers(app)
settings = ServerSettings(trusted_hosts=["refunds.example.com"])
app.mount("/agents", create_app(runner, authenticate=who, settings=settings))


def signed_in(page: str, session: str) -> HTMLResponse:
    response = HTMLResponse(page)
    response.set_cookie("session", session, httponly=True, samesite="strict")
    return response


@app.get("/")
async def customer() -> HTMLResponse:
    run_id = await runner.submit("refund", tenant="ada")
    return signed_in(PAGE.replace("RUN", f"agents/api/v1/runs/{run_id}"), CUSTOMER)


@app.get("/staff")
async def staff() -> HTMLResponse:
    return signed_in(STAFF_PAGE, STAFF)


PAGE = """<!doctype html><title>Refund</title><pre></pre><script>
const events = new EventSource("RUN/events")
events.onmessage = ({data}) => {
  document.querySelector("pre").append(data + "\\n")
  if (JSON.parse(data).type === "end") events.close()
}
</script>"""

STAFF_PAGE = """<!doctype html><title>Refunds</title><button>Pay all</button><script>
document.querySelector("button").onclick = async () => {
  const {items} = await (await fetch("agents/api/v1/approvals")).json()
  for (const {run_id, name} of items) await fetch(`agents/api/v1/runs/${run_id}/approvals/${name}`, {
    method: "POST", headers: {"Content-Type": "application/json", "X-Agent-Runtime": "1"}, body: '{"answer": true}'})
}
</script>"""
