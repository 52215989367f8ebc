package door

import (
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"evenkeel/gateway/openai"
)

// endpointLasts is how long a page of endpoint metrics is good: pickers ask every 50 ms, and anybody may ask.
const endpointLasts = 50 * time.Millisecond

// metrics tells the picker of an InferencePool how busy the proxy is, in the words of vLLM.
func (d *Door) metrics(ctx *fasthttp.RequestCtx) {
	if !d.host.Config.Settings().GatewayAPI.Metrics {
		d.host.Requests.Fail(ctx, openai.NewError(http.StatusNotFound, "not_found", "no such path: "+string(ctx.Method())+" "+endpointPath+"; the metrics of this proxy are at its admin listener"))
		return
	}
	d.endpoint.mu.Lock()
	defer d.endpoint.mu.Unlock()
	if now := time.Now(); now.Sub(d.endpoint.made) >= endpointLasts {
		d.endpoint.made, d.endpoint.text = now, appendLoads(nil, d.host.Loads(ctx))
	}
	ctx.SetContentType("text/plain; version=0.0.4; charset=utf-8")
	_, _ = ctx.Write(d.endpoint.text) // into memory
}

const endpointPath = "/metrics"

// appendLoads appends three gauges.
func appendLoads(dst []byte, loads []ModelLoad) []byte {
	for _, g := range []struct {
		name, help string
		of         func(l ModelLoad) float64
	}{
		{"vllm:num_requests_running", "Requests that have a decode slot.", func(l ModelLoad) float64 { return float64(l.Running) }},
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
