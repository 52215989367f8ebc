package door

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"evenkeel/gateway/openai"
)

// endpointLasts is how long a page of endpoint metrics is good, and endpointWaits how long one may take: anybody may ask for it, and it asks
// the dispatcher.
const (
	endpointLasts = 200 * time.Millisecond
	endpointWaits = time.Second
)

// metrics tells the picker of an InferencePool how busy the proxy is, in the words of vLLM.
func (d *Door) metrics(ctx *fasthttp.RequestCtx) {
	if !d.host.Config.Settings().GatewayAPI.Metrics {
		d.host.Requests.Fail(ctx, openai.NewError(http.StatusNotFound, "not_found", "no such path: "+string(ctx.Method())+" "+endpointPath+"; the metrics of this proxy are at its admin listener"))
		return
	}
	page := d.endpoint.last.Load()
	if (page == nil || time.Since(page.made) >= endpointLasts) && d.endpoint.busy.CompareAndSwap(false, true) { // others get the page of before
		wait, stop := context.WithTimeout(d.host.Service.Context(), endpointWaits)
		loads := d.host.Loads(wait)
		if wait.Err() == nil {
			page = &endpointText{time.Now(), appendLoads(nil, loads)}
			d.endpoint.last.Store(page)
		}
		stop()
		d.endpoint.busy.Store(false)
	}
	if page == nil {
		ctx.SetStatusCode(http.StatusServiceUnavailable) // nothing is known yet
		return
	}
	ctx.SetContentType("text/plain; version=0.0.4; charset=utf-8")
	_, _ = ctx.Write(page.text) // into memory
}

const endpointPath = "/metrics"

// appendLoads appends three gauges.
func appendLoads(dst []byte, loads []ModelLoad) []byte {
	for _, g := range []struct {
		name, help string
		of         func(l ModelLoad) float64
	}{
		{"vllm:num_requests_running", "Requests that an engine prefills, or that have a decode slot.", func(l ModelLoad) float64 { return float64(l.Running) }},
		{"vllm:num_requests_waiting", "Requests that wait for a prefill or for a decode slot.", func(l ModelLoad) float64 { return float64(l.Waiting) }},
		{"vllm:kv_cache_usage_perc", "Share of the decode ranks' KV cache that is in use. 1 is all of it.", func(l ModelLoad) float64 { return l.KV }},
	} {
		dst = fmt.Appendf(dst, "# HELP %s %s\n# TYPE %[1]s gauge\n", g.name, g.help)
		for _, l := range loads {
			dst = fmt.Appendf(dst, "%s{model_name=%s} %v\n", g.name, strconv.Quote(l.Model), g.of(l))
		}
	}
	return dst
}
