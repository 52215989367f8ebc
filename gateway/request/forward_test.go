package request

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"

	"evenkeel/engine"
	"evenkeel/geo"
)

// What a client asked for holds at the dispatcher that serves its request, and nobody on the way
// there can change it.
func TestWhatGoesAlongToAPeer(t *testing.T) {
	var ctx fasthttp.RequestCtx
	j := &job{incoming: &Incoming{}}
	require.Empty(t, j.forwardedHeaders(&ctx))
	ctx.Request.Header.Set(SessionHeader, "a")
	ctx.Request.Header.Set(SessionEndHeader, "true")
	ctx.Request.Header.Set(PolicyHeader, "only trusted callers choose it, and for this dispatcher")
	j.incoming.NeverForward, j.incoming.Batch, j.incoming.Deadline = true, true, time.Now().Add(-time.Hour)
	headers := j.forwardedHeaders(&ctx)
	require.Equal(t, []engine.Header{
		{Name: "X-Evenkeel-Session", Value: "a"}, {Name: "X-Evenkeel-Session-End", Value: "true"}, {Name: "X-Evenkeel-Geo", Value: "local"},
		{Name: "X-Evenkeel-Class", Value: "batch"}, {Name: "X-Evenkeel-Deadline-Ms", Value: "1"},
	}, headers)
	for _, h := range headers {
		require.True(t, geo.Covered(h.Name), h.Name)
	}
}
