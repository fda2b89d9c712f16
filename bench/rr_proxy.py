"""Plain round robin, the reference without affinity: rr_proxy.py PORT WORKER_URL... Streams pass."""

import itertools
import sys

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

turns = itertools.cycle(sys.argv[2:])


async def client(app):
    app["http"] = ClientSession(timeout=ClientTimeout(total=None), connector=TCPConnector(limit=0))
    yield
    await app["http"].close()


async def forward(request):
    headers = {"content-type": request.headers.get("content-type", "application/json")}
    async with request.app["http"].request(
        request.method, next(turns) + request.path_qs, data=await request.read(), headers=headers
    ) as answer:
        out = web.StreamResponse(
            status=answer.status, headers={"content-type": answer.headers.get("content-type", "text/plain")}
        )
        await out.prepare(request)
        async for piece in answer.content.iter_any():
            await out.write(piece)
        await out.write_eof()
        return out


app = web.Application(client_max_size=64 << 20)
app.cleanup_ctx.append(client)
app.router.add_route("*", "/{tail:.*}", forward)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
