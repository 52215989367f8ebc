package admission

import (
	"net/http"
	"slices"

	"github.com/valyala/fasthttp"
)

// preflightAge is how long a browser may remember the answer to a preflight, in seconds.
const preflightAge = "600"

// allowOrigin allows the page of another site to read the answer, if the site is one of
// cors.origins. allowed says whether the page may read the answer. Unless all sites are allowed, it
// sets Vary: Origin, because a cache on the way could otherwise give one site the answer that was
// meant for another. Answers do not depend on cookies, so browsers are not allowed to send them.
func (d *Handler) allowOrigin(ctx *fasthttp.RequestCtx) (allowed bool) {
	origins := d.deps.Config.Settings().CORS.Origins
	if len(origins) == 0 { // no page of another site may read any answer
		return false
	}
	h := &ctx.Response.Header
	origin := string(ctx.Request.Header.Peek("Origin"))
	site := "*" // "*": the pages of all sites may read the answer
	if !slices.Contains(origins, site) {
		h.Add("Vary", "Origin")
		if !slices.Contains(origins, origin) {
			return false
		}
		site = origin
	}
	if origin == "" { // no page of another site has sent the request
		return false
	}
	h.Set("Access-Control-Allow-Origin", site)
	h.Set("Access-Control-Expose-Headers", "*")
	return true
}

// preflight answers a browser that asks whether a page may send a request to a route, before the
// browser sends that request. method is the method that the route takes.
func preflight(ctx *fasthttp.RequestCtx, method string) {
	h := &ctx.Response.Header
	h.Set("Access-Control-Allow-Methods", method)
	if asked := ctx.Request.Header.Peek("Access-Control-Request-Headers"); len(asked) > 0 { // "*" would not include Authorization
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
