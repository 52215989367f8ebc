package admission

import (
	"net/http"
	"time"

	"github.com/valyala/fasthttp"

	"evenkeel/gateway/edge"
	"evenkeel/gateway/openai"
)

// abort ends requests of the caller by their names, as engines do: a name that no request of the caller has is ignored.
func (d *Handler) abort(ctx *fasthttp.RequestCtx) {
	key, fail := d.authenticate(ctx)
	if fail == nil {
		fail = inRate(key, time.Now())
	}
	var takes func(name string) bool
	if fail == nil {
		takes, fail = d.toAbort(ctx)
	}
	if fail != nil {
		d.host.Requests.Journal.Refused(fail)
		d.host.Requests.Fail(ctx, fail)
		return
	}
	d.host.Requests.Running.End(key.Name, takes)
	ctx.SetStatusCode(http.StatusOK)
}

func (d *Handler) toAbort(ctx *fasthttp.RequestCtx) (takes func(name string) bool, fail *openai.Error) {
	packed, charge := edge.AcquireBody(ctx)
	defer charge.Give()
	raw, r := edge.Unpack(&ctx.Request.Header, packed, charge, d.host.Config.Settings().Limits.Body)
	if r != nil {
		return nil, &openai.Error{Status: r.Status, Code: r.Code, Message: r.Message}
	}
	return openai.Aborts(string(ctx.Path()), raw)
}
