package admission

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/openai"
)

// Any client may ask for the page of metrics, and each new page interrupts the dispatcher.
// Therefore a page is sent again until it is older than pageLasts. Making a page takes at most
// pageTimeout. A page older than pageStale is not sent.
const (
	pageLasts   = 200 * time.Millisecond
	pageTimeout = time.Second
	pageStale   = 10 * time.Second
)

// metrics shows the endpoint picker of an InferencePool how busy the proxy is, under the metric
// names of vLLM.
func (d *Handler) metrics(ctx *fasthttp.RequestCtx) {
	if !d.deps.Config.Settings().GatewayAPI.Metrics {
		d.deps.Requests.Fail(ctx, openai.NewError(http.StatusNotFound, "not_found",
			"no such path: "+string(ctx.Method())+" "+metricsPath+"; the metrics of this proxy are at its admin listener"))
		return
	}
	page := d.loadPage.last.Load()
	isOld := page == nil || time.Since(page.made) >= pageLasts
	// One request at a time makes a new page. Meanwhile all other requests get the last page.
	if isOld && d.loadPage.beingMade.CompareAndSwap(false, true) {
		d.makePage() // at its end it sets beingMade back to false
		page = d.loadPage.last.Load()
	}
	if page == nil || time.Since(page.made) >= pageStale {
		ctx.SetStatusCode(http.StatusServiceUnavailable) // without a recent page the load is not known
		return
	}
	d.writePage(ctx, "text/plain; version=0.0.4; charset=utf-8", page.text)
}

// writePage answers with a page, which counts as an answer of the caller until it is written. It
// answers with an error if the caller may hold no more memory for it.
func (d *Handler) writePage(ctx *fasthttp.RequestCtx, contentType string, page []byte) {
	memory, ok := edge.ChargeAnswer(ctx, len(page))
	if !ok {
		d.deps.Requests.Fail(ctx, failure.NoRoomForAnswer)
		return
	}
	edge.AnswerWhole(ctx, contentType, page, memory)
}

// makePage makes a new page of metrics, and then lets another request make the next page. If the
// dispatcher does not answer in time, the last page stays.
func (d *Handler) makePage() {
	defer d.loadPage.beingMade.Store(false)
	ctx, cancel := context.WithTimeout(d.deps.Service.Context(), pageTimeout)
	defer cancel()
	if loads := d.deps.Loads(ctx); ctx.Err() == nil { // otherwise the dispatcher did not answer in time, and loads lacks its part
		d.loadPage.last.Store(&endpointText{time.Now(), appendLoads(nil, loads)})
	}
}

const metricsPath = "/metrics"

// appendLoads appends three gauges to dst, each with a value for every model, in the text format of
// Prometheus.
func appendLoads(dst []byte, loads []ModelLoad) []byte {
	for _, gauge := range []struct {
		name, help string
		value      func(l ModelLoad) float64
	}{
		{"vllm:num_requests_running", "Requests that an engine prefills, or that have a decode slot.", func(l ModelLoad) float64 { return float64(l.Running) }},
		{"vllm:num_requests_waiting", "Requests that wait for a prefill or for a decode slot.", func(l ModelLoad) float64 { return float64(l.Waiting) }},
		{"vllm:kv_cache_usage_perc", "Share of the decode ranks' KV cache that is in use. 1 is all of it.", func(l ModelLoad) float64 { return l.KV }},
	} {
		dst = fmt.Appendf(dst, "# HELP %s %s\n# TYPE %[1]s gauge\n", gauge.name, gauge.help)
		for _, load := range loads {
			dst = fmt.Appendf(dst, "%s{model_name=%s} %v\n", gauge.name, strconv.Quote(load.Model), gauge.value(load))
		}
	}
	return dst
}
