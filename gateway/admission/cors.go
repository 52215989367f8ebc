package admission

import (
	"net/http"
	"slices"

	"github.com/valyala/fasthttp"
)

// preflightAge is for how many seconds a browser remembers what it was told of a path.
const preflightAge = "600"

// share tells a browser that the page of another site, if it is one of cors.origins, may read the answer; shared says that it may. If not
// every site may, the header Vary sets answers apart by Origin, because a cache between us would give one site what was said to another.
// No answer depends on cookies, so none allows a browser to send them.
func (d *Handler) share(ctx *fasthttp.RequestCtx) (shared bool) {
	origins := d.host.Config.Settings().CORS.Origins
	if len(origins) == 0 {
		return false
	}
	h, origin := &ctx.Response.Header, string(ctx.Request.Header.Peek("Origin"))
	allowed := "*"
	if !slices.Contains(origins, allowed) {
		h.Add("Vary", "Origin")
		if allowed = origin; !slices.Contains(origins, origin) {
			return false
		}
	}
	if origin == "" {
		return false
	}
	h.Set("Access-Control-Allow-Origin", allowed)
	h.Set("Access-Control-Expose-Headers", "*")
	return true
}

// preflight answers a browser that asks whether a page may send a request to a route, before the browser sends that request. method is the
// method that the route takes.
func preflight(ctx *fasthttp.RequestCtx, method string) {
	h := &ctx.Response.Header
	h.Set("Access-Control-Allow-Methods", method)
	if asked := ctx.Request.Header.Peek("Access-Control-Request-Headers"); len(asked) > 0 { // a star would not allow Authorization
		h.SetBytesV("Access-Control-Allow-Headers", asked)
		h.Add("Vary", "Access-Control-Request-Headers")
	}
	h.Set("Access-Control-Max-Age", preflightAge)
	ctx.SetStatusCode(http.StatusNoContent)
}

// isPreflight says whether a request is a preflight (see preflight).
func isPreflight(h *fasthttp.RequestHeader) bool {
	return string(h.Method()) == http.MethodOptions && len(h.Peek("Access-Control-Request-Method")) > 0
}
