package door

import (
	"strconv"

	"github.com/valyala/fasthttp"

	"evenkeel/gateway/edge"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/through"
)

// pass serves a request that goes to one engine as it came.
func (d *Door) pass(ctx *fasthttp.RequestCtx, path string) {
	d.receive(ctx, path, func(in *incoming) *openai.Error {
		in.Told.Parsing()
		req, raw, fail := d.admitWhole(ctx, path, in)
		in.Told.Parsed(req)
		if fail != nil {
			return fail
		}
		if fail := in.meter(through.Estimate(path, req), in.Told.Arrival); fail != nil {
			return fail
		}
		return d.host.Through.Serve(ctx, in.Incoming, req, path, raw)
	})
}

// admitWhole checks such a request against what can be served at all.
func (d *Door) admitWhole(ctx *fasthttp.RequestCtx, path string, in *incoming) (*openai.Request, []byte, *openai.Error) {
	if fail := d.leaving(ctx, in); fail != nil {
		return nil, nil, fail
	}
	raw, charge := edge.TakeBody(ctx)
	in.Body = charge
	req, fail := through.Parse(path, raw, string(ctx.Request.Header.ContentType()), d.host.Config.Settings().Accept)
	if fail != nil {
		return nil, nil, fail
	}
	return req, raw, d.here(path, req.Model)
}

// here refuses a request of an endpoint that is served here or not at all, if no engine of
// this region has its model.
func (d *Door) here(path, model string) *openai.Error {
	_, ok, known := d.host.Fleet.Lookup(model)
	switch {
	case ok:
	case d.host.Node != nil && d.host.Node.Offered(model):
		return openai.Unavailable("no_region_available", "no engine of this region serves "+strconv.Quote(model)+", and requests to "+path+" are not sent to other regions; send it to a proxy there", 1)
	case known:
		return noSuchModel(model)
	}
	return nil
}
