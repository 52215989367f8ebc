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
	if fail := d.leaving(ctx); fail != nil {
		return nil, nil, fail
	}
	raw, charge := edge.TakeBody(ctx)
	in.Body = charge
	req, fail := through.Parse(path, raw, string(ctx.Request.Header.ContentType()), d.host.Config.Settings().Accept)
	if fail != nil {
		return nil, nil, fail
	}
	if _, ok, known := d.host.Fleet.Lookup(req.Model); !ok {
		switch {
		case d.host.Node != nil && d.host.Node.Offered(req.Model):
			return req, raw, openai.Unavailable("no_region_available", "no engine of this region serves "+strconv.Quote(req.Model)+", and requests to "+path+" are not sent to other regions; send it to a proxy there", 1)
		case known:
			return req, raw, noSuchModel(req.Model)
		}
	}
	return req, raw, nil
}
