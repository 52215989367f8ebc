package admission

import (
	"net/http"
	"time"

	"github.com/valyala/fasthttp"

	"evenkeel/gateway/edge"
	"evenkeel/gateway/openai"
)

// abort ends the caller's requests that the body names, as the abort endpoints of engines do. It
// ignores names that no request of the caller has.
func (d *Handler) abort(ctx *fasthttp.RequestCtx) {
	key, fail := d.authenticate(ctx)
	if fail == nil { // each of the next steps is taken only if none before it has failed
		fail = countRequest(key, time.Now())
	}
	var matches func(name string) bool
	if fail == nil {
		matches, fail = d.abortMatcher(ctx)
	}
	if fail != nil {
		d.deps.Requests.Journal.CountRefused(fail)
		d.deps.Requests.Fail(ctx, fail)
		return
	}
	d.deps.Requests.Running.End(key.Name, matches)
	ctx.SetStatusCode(http.StatusOK)
}

// abortMatcher reads from the body which requests are to end. matches says whether a request with
// the given name is one of them.
func (d *Handler) abortMatcher(ctx *fasthttp.RequestCtx) (matches func(name string) bool, fail *openai.Error) {
	packed, reservation := edge.AcquireBody(ctx)
	defer reservation.Release()
	raw, refusal := edge.Unpack(&ctx.Request.Header, packed, reservation, d.deps.Config.Settings().Limits.Body)
	if refusal != nil {
		return nil, &openai.Error{Status: refusal.Status, Code: refusal.Code, Message: refusal.Message}
	}
	return openai.ParseAbort(string(ctx.Path()), raw)
}
