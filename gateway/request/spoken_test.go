package request

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

const firstEvent = `data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"ref",` +
	`"choices":[{"index":0,"delta":{"role":"assistant","content":"a"},"finish_reason":null}]}` + "\n\n"

// speaks has the first decode engine answer 200 with events, and with more of them once the proxy
// has read those.
func (b *bed) speaks(t *testing.T, first, more string) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, first)
		if f, ok := w.(http.Flusher); ok && more != "" {
			f.Flush()
			b.eventually("the first events are read", func() bool { return b.begun() > 0 })
			_, _ = io.WriteString(w, more)
		}
	}))
	t.Cleanup(srv.Close)
	u, err := url.Parse(srv.URL)
	require.NoError(t, err)
	target := *b.engines.ranks[0].Target
	target.URL = u
	b.engines.ranks[0].Target = &target
}

func errorEvent(status int) string {
	return fmt.Sprintf("data: {\"error\":{\"message\":\"no\",\"type\":\"x\",\"code\":%d}}\n\ndata: [DONE]\n\n", status)
}

// What an engine says with an event counts as the status would, whether it is the first event or
// comes in the middle. 401 and 403 refuse our own credential, which is not the request's fault.
func TestErrorsWithinAnAnswer(t *testing.T) {
	for _, row := range []struct {
		status        int
		first, middle string // of an answer in one piece, which may begin anew
	}{
		{401, "502, 1 attempts", "200, 2 attempts, faulted"},
		{403, "502, 1 attempts", "200, 2 attempts, faulted"},
		{429, "200, 2 attempts", "429, 1 attempts"},
		{501, "502, 1 attempts", "200, 2 attempts"},
		{503, "200, 2 attempts, faulted", "200, 2 attempts, faulted"},
	} {
		for _, middle := range []bool{false, true} {
			t.Run(fmt.Sprint(row.status, " in the middle ", middle), func(t *testing.T) {
				t.Parallel()
				b := start(t, setup{decode: []refengine.Config{{}, {}}})
				want := row.first
				if b.speaks(t, errorEvent(row.status), ""); middle {
					want = row.middle
					b.speaks(t, firstEvent, errorEvent(row.status))
				}
				got := b.post(mooncake.Chat.Path(), chat(short, ""))
				b.settle()
				said := fmt.Sprintf("%d, %d attempts", got.status, b.asked[0].Record.Attempts)
				for _, judged := range b.monitor.judged["decode d0"] {
					if judged == engine.Faulted {
						said += ", faulted"
					}
				}
				require.Equal(t, want, said)
			})
		}
	}
}

// releases are the ends that slots had.
type releases struct {
	Dispatcher
	mu   sync.Mutex
	ends []board.Outcome
}

func (r *releases) Release(slot *dispatcher.Slot, o board.Outcome) {
	r.mu.Lock()
	r.ends = append(r.ends, o)
	r.mu.Unlock()
	r.Dispatcher.Release(slot, o)
}

// A prefill call that ends its decode call says nothing about the pair of engines.
func TestAFailedPrefillDoesNotMakeItsPairSuspect(t *testing.T) {
	for _, connector := range []string{mooncake.SGLang, mooncake.AscendLayerwise} {
		for _, fault := range []refengine.Fault{refengine.Reset, refengine.Internal} {
			t.Run(fmt.Sprint(connector, " ", fault), func(t *testing.T) {
				t.Parallel()
				b := start(t, setup{prefill: []refengine.Config{{}, {}}, decode: []refengine.Config{{}, {}},
					profile: mooncake.Profile{Connector: connector}})
				r := &releases{Dispatcher: b.Server.Dispatcher}
				b.Server.Dispatcher = r
				require.NoError(t, b.p[0].SetFaults(refengine.Rule{Fault: fault, Count: 1}))
				require.Equal(t, "right", b.judge(short, `"stream":true,`))
				b.settle()
				for _, o := range r.ends {
					require.False(t, o.Lost, "%+v", r.ends)
				}
			})
		}
	}
}

// The decode engine is done with an answer that came at once. Its slot is free while the prefill
// engine's word is waited for.
func TestAnAnswerThatCameAtOnceHoldsNoSlot(t *testing.T) {
	for _, more := range []string{`"stream":true,"max_tokens":1,`, `"max_tokens":1,`} {
		for _, nonStream := range []string{"", mooncake.NonStreamPassthrough} {
			t.Run(more+nonStream, func(t *testing.T) {
				t.Parallel()
				b := start(t, setup{profile: mooncake.Profile{Connector: mooncake.SGLang, NonStream: nonStream},
					configure: func(c *config.Config, _ *Deps) {
						c.Bind.Grace, c.Bind.Confirm = time.Minute, time.Millisecond
					}})
				r := &releases{Dispatcher: b.Server.Dispatcher}
				b.Server.Dispatcher = r
				require.NoError(t,
					b.p[0].SetFaults(refengine.Rule{Fault: refengine.Hang, Phase: refengine.PhaseMidStream, Leg: refengine.LegProbe, Count: 1}))
				done := make(chan reply, 1)
				go func() { done <- b.post(mooncake.Chat.Path(), chat(short, more)) }()
				var kind board.Kind
				require.Eventually(t, func() bool {
					r.mu.Lock()
					defer r.mu.Unlock()
					if len(r.ends) > 0 {
						kind = r.ends[0].Kind
					}
					return len(r.ends) > 0
				}, patience, time.Millisecond, "the slot is free")
				select {
				case got := <-done:
					require.Fail(t, "it was answered before", "%d", got.status)
				default:
				}
				require.Equal(t, board.Finished, kind)
				require.NoError(t, b.p[0].SetFaults())
				b.p[0].Close()
				<-done
			})
		}
	}
}

// panicky panics as a second probe is prepared.
type panicky struct {
	Fleet
	probes atomic.Int32
}

func (p *panicky) BootstrapInfo(c prefill.Candidate) (*mooncake.BootstrapInfo, error) {
	if p.probes.Add(1) == 2 {
		panic("on purpose")
	}
	return p.Fleet.BootstrapInfo(c)
}

// An answer that was lost, and whose way on panics, is not accounted for as whole.
func TestAPanicOnTheWayOnIsNoWholeAnswer(t *testing.T) {
	for _, more := range []string{`"stream":true,`, ``} {
		b := start(t, setup{prefill: []refengine.Config{{}, {}}, decode: []refengine.Config{{}, {}},
			profile: mooncake.Profile{ChatResume: mooncake.ChatResumeContinue}})
		b.Server.Fleet = &panicky{Fleet: b.Server.Fleet}
		require.NoError(t, b.d[0].SetFaults(refengine.Rule{Fault: refengine.Reset, Phase: refengine.PhaseMidStream, AfterTokens: half, Count: 1}))
		said := strings.NewReader(chat(long, more))
		resp, err := http.Post(b.url+mooncake.Chat.Path(), "application/json", said) //nolint:noctx // the bed ends it
		if err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
		b.settle()
		all, err := b.registry.Gather()
		require.NoError(t, err)
		for _, family := range all {
			if family.GetName() != "evenkeel_requests_total" {
				continue
			}
			for _, m := range family.GetMetric() {
				for _, l := range m.GetLabel() {
					if l.GetName() == "outcome" && l.GetValue() == "ok" {
						require.Zero(t, m.GetCounter().GetValue(), "stream %q", more)
					}
				}
			}
		}
	}
}

// A rank whose answers are empty fails at nothing, so its board has to count them.
func TestAnAnswerWithoutAnyTextIsCountedOnItsRank(t *testing.T) {
	event := func(delta, finish string) string {
		return `data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"ref","choices":[{"index":0,"delta":{` + delta + `},"finish_reason":` + finish + `}]}` + "\n\n"
	}
	const done = "data: [DONE]\n\n"
	for name, row := range map[string]struct {
		events string
		empty  uint64
	}{
		"the end at once":      {event(`"role":"assistant","content":""`, "null") + event("", `"stop"`), 1},
		"a text":               {event(`"role":"assistant","content":""`, "null") + event(`"content":"no"`, "null") + event("", `"stop"`), 0},
		"reasoning only":       {event(`"role":"assistant","reasoning_content":"hm"`, "null") + event("", `"stop"`), 0},
		"a call of a tool":     {event(`"role":"assistant","tool_calls":[{"index":0,"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]`, "null") + event("", `"tool_calls"`), 0},
		"no token was allowed": {event(`"role":"assistant","content":""`, "null") + event("", `"length"`), 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{})
			b.speaks(t, row.events+done, "")
			require.Equal(t, http.StatusOK, b.post(mooncake.Chat.Path(), chat(short, `"stream":true,`)).status)
			b.over()
			w := b.Dispatcher.Status(t.Context()).Models[0].Workers[0]
			require.Equal(t, [2]uint64{1, row.empty}, [2]uint64{w.Answers, w.Empty})
		})
	}
}
