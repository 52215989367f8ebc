package request

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/internal/race"
	"evenkeel/mooncake"
)

// Prompts whose answers have 8 and 200 tokens.
const short, long = "prompt 117", "prompt 107"

// half is the middle of a long answer. The client has a part of the answer by then.
const half = 150

// ends are the ways in which an engine can end a leg.
var ends = map[string]refengine.Rule{
	"cannot be sent":                     {},
	"is refused with 422":                {Fault: refengine.Status, Value: 422},
	"is refused with 501":                {Fault: refengine.Status, Value: 501},
	"is refused and freed":               {Fault: refengine.Busy, Cleanup: true},
	"is reset before the head":           {Fault: refengine.Reset},
	"is reset after the 200":             {Fault: refengine.Reset, Phase: refengine.PhaseAfterHeaders},
	"is reset in the middle":             {Fault: refengine.Reset, Phase: refengine.PhaseMidStream, AfterTokens: half},
	"is reset inside a chunk":            {Fault: refengine.Reset, Phase: refengine.PhaseInsideChunk, AfterTokens: half},
	"is silent before the head":          {Fault: refengine.Hang},
	"is silent after the 200":            {Fault: refengine.Hang, Phase: refengine.PhaseAfterHeaders},
	"falls silent in the middle":         {Fault: refengine.Hang, Phase: refengine.PhaseMidStream, AfterTokens: half},
	"is refused with 400":                {Fault: refengine.Reject},
	"is refused with 404":                {Fault: refengine.Status, Value: 404},
	"is refused with 429":                {Fault: refengine.Status, Value: 429},
	"is refused with 500":                {Fault: refengine.Internal},
	"is refused with 502":                {Fault: refengine.Status, Value: 502},
	"is refused with 503":                {Fault: refengine.Busy},
	"begins with an error event":         {Fault: refengine.ErrorEvent},
	"has an error event in the middle":   {Fault: refengine.ErrorEvent, AfterTokens: half},
	"is an error beneath a 200":          {Fault: refengine.Error200},
	"ends before the first token":        {Fault: refengine.SilentEnd},
	"ends in the middle":                 {Fault: refengine.SilentEnd, AfterTokens: half},
	"ends without a reason":              {Fault: refengine.MissingFinish},
	"ends without [DONE]":                {Fault: refengine.MissingDone},
	"is given back at the first token":   {Fault: refengine.Recomputed},
	"is given back in the middle":        {Fault: refengine.Recomputed, AfterTokens: half},
	"is garbage":                         {Fault: refengine.Garbage},
	"has another content type":           {Fault: refengine.WrongType},
	"hands nothing off":                  {Fault: refengine.NullHandoff},
	"hands off no blocks":                {Fault: refengine.EmptyBlocks},
	"hands off blocks that are no ids":   {Fault: refengine.StringBlocks},
	"hands off to somebody":              {Fault: refengine.WrongHost},
	"ends with its first token":          {Fault: refengine.EOSFirst},
	"is never called back":               {Fault: refengine.NoCallback},
	"is called back from somewhere":      {Fault: refengine.CallbackBadHost},
	"is called back for another request": {Fault: refengine.CallbackShortID},
	"is called back with a new key":      {Fault: refengine.CallbackNewKey},
	"is called back twice":               {Fault: refengine.CallbackTwice},
	"needs nothing":                      {Fault: refengine.CallbackEmpty},
	"is aborted and answers 200":         {Fault: refengine.PrefillAbort200},
}

// callbackOf is what is counted of the callback, or of the second one.
var callbackOf = map[string]string{
	"is called back twice": "duplicate", "is called back for another request": "ok", "is called back with a new key": "ok", "needs nothing": "ok",
	"is called back from somewhere": "bad",
}

// A legEnd is what comes of a request when one of its legs ends so: of a streamed one, and of one
// whose answer comes in one piece.
type legEnd struct{ leg, streamed, whole string }

const again = "right, 2 attempts, 2 prefills"

// It is a rule of gateway/lifecycle what becomes of a request, of its hand-off and of its engines
// when a leg ends. Here the rules meet
// engines: the first engine ends the leg so, once, and a second engine of its role is well. No engine may ever find that the
// proxy has used a hand-off twice, and nothing may be held in the end.
func TestWhatComesOfTheEndOfALeg(t *testing.T) {
	t.Parallel()
	limit := 3 * time.Second // of the silent engine, and of the well one
	if race.Enabled {
		limit = 5 * time.Second
	}
	for _, table := range []struct {
		name, connector, of string // the leg
		rows                []legEnd
	}{
		{"a probe", "", refengine.LegProbe, []legEnd{
			{"cannot be sent", "right, 2 attempts, p0 failed, p0 reported", ""},
			{"is reset before the head", again + ", 1 left to the hold, p0 failed, p0 reported", ""},
			{"is reset after the 200", again + ", 1 left to the hold, p0 failed, p0 reported", ""},
			{"is silent before the head", again + ", 1 left to the hold, p0 failed, p0 reported", ""},
			{"is silent after the 200", again + ", 1 left to the hold, p0 failed, p0 reported", ""},
			{"is refused with 400", "400", ""},
			{"is refused with 404", "404", ""},
			{"is refused with 422", "422", ""},
			{"is refused with 501", "502", ""},
			{"is refused with 429", again + ", p0 failed", ""},
			{"is refused with 500", again + ", p0 failed", ""},
			{"is refused with 502", again + ", p0 failed", ""},
			{"is refused with 503", again + ", p0 failed", ""},
			{"is an error beneath a 200", again + ", 1 left to the hold, p0 failed", ""},
			{"is garbage", again + ", 1 left to the hold, p0 failed", ""},
			{"has another content type", "right", ""},
			{"hands nothing off", again + ", p0 failed", ""},
			{"hands off no blocks", again + ", p0 failed", ""},
			{"hands off blocks that are no ids", again + ", 1 left to the hold, p0 failed", ""},
			{"hands off to somebody", again + ", 1 left to the hold, p0 failed", ""},
			{"ends with its first token", "right", ""},
		}},
		{"a decode", "", refengine.LegDecode, []legEnd{
			{"cannot be sent", "right, 2 attempts, d0 faulted, d0 reported", ""},
			{"is reset before the head", again + ", drained, d0 unclear, d0 reported", ""},
			{"is reset after the 200", again + ", drained, d0 unclear, d0 reported", ""},
			{"is reset in the middle", "upstream_broken, d0 faulted, d0 reported", again + ", d0 faulted, d0 reported"},
			{"is reset inside a chunk", "upstream_broken, d0 faulted, d0 reported", again + ", d0 faulted, d0 reported"},
			{"is silent before the head", again + ", drained, d0 unclear, d0 reported", ""},
			{"is silent after the 200", again + ", drained, d0 unclear, d0 reported", ""},
			{"falls silent in the middle", "upstream_broken, d0 silent, d0 reported", again + ", d0 silent, d0 reported"},
			{"is refused with 400", "400, drained", ""},
			{"is refused with 404", "404, drained", ""},
			{"is refused with 429", again + ", drained", ""},
			{"is refused with 500", again + ", drained, d0 unclear", ""},
			{"is refused with 502", again + ", drained, d0 unclear", ""},
			{"is refused with 503", again + ", drained, d0 faulted", ""},
			{"begins with an error event", again + ", drained, d0 unclear", ""},
			{"has an error event in the middle", "500, d0 unclear", again + ", d0 faulted"},
			{"is an error beneath a 200", again + ", drained, d0 unclear", ""},
			{"ends before the first token", again + ", drained, d0 unclear", ""},
			{"ends in the middle", "upstream_incomplete, d0 faulted", again + ", d0 faulted"},
			{"ends without a reason", "upstream_incomplete, d0 faulted", again + ", d0 faulted"},
			{"ends without [DONE]", "right", ""},
			{"is given back at the first token", again, ""},
			{"is given back in the middle", "recompute_unresumable", again},
			{"is garbage", again + ", drained, d0 unclear", ""},
			{"has another content type", again + ", drained, d0 unclear", ""},
		}},
		{"a decode of an engine that frees what it refuses", mooncake.AscendMooncakeV1, refengine.LegDecode, []legEnd{
			{"cannot be sent", "right, 2 attempts, d0 faulted, d0 reported", ""},
			{"is refused and freed", again + ", d0 faulted", ""},
			{"is reset before the head", again + ", drained, d0 unclear, d0 reported", ""},
			{"begins with an error event", again + ", drained, d0 unclear", ""},
			{"ends before the first token", again + ", drained, d0 unclear", ""},
		}},
		{"a prefill beside its decode, of SGLang", mooncake.SGLang, refengine.LegProbe, []legEnd{
			{"is reset before the head", again + ", p0 failed, p0 reported", ""},
			{"is reset after the 200", again + ", p0 failed, p0 reported", ""},
			{"is silent before the head", again + ", p0 failed, p0 reported", ""},
			{"is refused with 400", "400", ""},
			{"is refused with 404", "404", ""},
			{"is refused with 429", again + ", p0 failed", ""},
			{"is refused with 500", again + ", p0 failed", ""},
			{"is refused with 503", again + ", p0 failed", ""},
			{"is an error beneath a 200", again + ", p0 failed", ""},
			{"begins with an error event", again + ", p0 failed", ""},
			{"ends before the first token", again + ", p0 failed", ""},
			{"is garbage", again + ", p0 failed", ""},
			{"has another content type", "right", ""},
			{"is aborted and answers 200", again, ""},
		}},
		{"a decode beside its prefill, of SGLang", mooncake.SGLang, refengine.LegDecode, []legEnd{
			{"is reset before the head", "right, 2 attempts, d0 unclear", ""},
			{"is reset after the 200", "right, 2 attempts, d0 unclear", ""},
			{"is reset in the middle", "upstream_broken, d0 faulted", "right, 2 attempts, d0 faulted"},
			{"is silent before the head", "right, 2 attempts", ""},
			{"is silent after the 200", "right, 2 attempts, d0 unclear", ""},
			{"falls silent in the middle", "upstream_broken, d0 silent", "right, 2 attempts, d0 silent"},
			{"is refused with 400", "400", ""},
			{"is refused with 404", "404", ""},
			{"is refused with 429", "right, 2 attempts", ""},
			{"is refused with 500", "right, 2 attempts, d0 unclear", ""},
			{"is refused with 503", "right, 2 attempts, d0 faulted", ""},
			{"begins with an error event", "right, 2 attempts, d0 unclear", ""},
			{"has an error event in the middle", "500, d0 unclear", "right, 2 attempts, d0 faulted"},
			{"is an error beneath a 200", "right, 2 attempts, d0 unclear", ""},
			{"ends before the first token", "right, 2 attempts, d0 unclear", ""},
			{"ends in the middle", "upstream_incomplete, d0 faulted", "right, 2 attempts, d0 faulted"},
			{"ends without a reason", "upstream_incomplete, d0 faulted", "right, 2 attempts, d0 faulted"},
			{"ends without [DONE]", "right", ""},
			{"is garbage", "right, 2 attempts, d0 unclear", ""},
			{"has another content type", "right, 2 attempts, d0 unclear", ""},
		}},
		{"a prefill that its decode calls for", mooncake.AscendLayerwise, refengine.LegProbe, []legEnd{
			{"is reset before the head", again + ", p0 failed, p0 reported", ""},
			{"is reset after the 200", "right, p0 failed, p0 reported", ""},
			{"is silent before the head", again + ", p0 failed, p0 reported", ""},
			{"is silent after the 200", "right, p0 failed, p0 reported", ""},
			{"is refused with 400", "400", ""},
			{"is refused with 404", "404", ""},
			{"is refused with 429", "right, 2 prefills, p0 failed", ""},
			{"is refused with 500", again + ", p0 failed", ""},
			{"is refused with 502", again + ", p0 failed", ""},
			{"is refused with 503", "right, 2 prefills, p0 failed", ""},
			{"is an error beneath a 200", again + ", p0 failed", ""},
			{"is garbage", again + ", p0 failed", ""},
			{"has another content type", "right", ""},
		}},
		{"a decode that calls for its prefill", mooncake.AscendLayerwise, refengine.LegDecode, []legEnd{
			{"is reset before the head", "right, 2 attempts, d0 unclear", ""},
			{"is reset after the 200", "right, 2 attempts, d0 unclear", ""},
			{"is reset in the middle", "upstream_broken, d0 faulted", again + ", d0 faulted"},
			{"is silent before the head", "right, 2 attempts, d0 faulted", ""},
			{"is silent after the 200", "right, 2 attempts, d0 faulted", ""},
			{"falls silent in the middle", "upstream_broken, d0 silent", again + ", d0 silent"},
			{"is refused with 400", "400, no prefill", ""},
			{"is refused with 404", "404, no prefill", ""},
			{"is refused with 429", "right, 2 attempts", ""},
			{"is refused with 500", "right, 2 attempts, d0 unclear", ""},
			{"is refused with 503", "right, 2 attempts, d0 faulted", ""},
			{"begins with an error event", again + ", d0 unclear", ""},
			{"has an error event in the middle", "500, d0 unclear", again + ", d0 faulted"},
			{"is an error beneath a 200", "right, 2 attempts, d0 unclear", ""},
			{"ends before the first token", again + ", d0 unclear", ""},
			{"ends in the middle", "upstream_incomplete, d0 faulted", again + ", d0 faulted"},
			{"ends without [DONE]", "right", ""},
			{"is given back at the first token", again, ""},
			{"is given back in the middle", "recompute_unresumable", again},
			{"is garbage", "right, 2 attempts, d0 unclear", ""},
			{"is never called back", "right, 2 attempts, d0 faulted", ""},
			{"is called back from somewhere", "502, no prefill", ""},
			{"is called back for another request", "right", ""},
			{"is called back with a new key", "right", ""},
			{"is called back twice", "right", ""},
			{"needs nothing", "right, no prefill", ""},
		}},
	} {
		for _, row := range table.rows {
			for _, stream := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s %s/stream %t", table.name, row.leg, stream), func(t *testing.T) {
					t.Parallel()
					rule, known := ends[row.leg]
					require.True(t, known, row.leg)
					o := setup{prefill: []refengine.Config{{}, {}}, decode: []refengine.Config{{}, {}},
						profile: mooncake.Profile{Connector: table.connector}}
					hangs := rule.Fault == refengine.Hang || rule.Fault == refengine.NoCallback // nothing else ends it
					if hangs {
						o.profile.FirstEventTimeout = limit
					}
					o.configure = func(c *config.Config, _ *Deps) {
						if hangs {
							c.Limits.EventTimeout, c.Limits.ProbeTimeout, c.Bind.CallbackTimeout = limit, limit, limit
						}
						if table.connector == mooncake.AscendLayerwise {
							c.Bind.Grace = 100 * time.Millisecond // for callbacks that come late
						}
					}
					b := start(t, o)
					late := table.connector == "" || table.connector == mooncake.AscendMooncakeV1
					b.engines.frees = table.connector == mooncake.AscendMooncakeV1
					rule.Count = 1
					if rule.Fault == refengine.Reset && !late && table.of == refengine.LegProbe { // the answer made of its KV has begun by then
						rule.DelayMS = int(limit.Milliseconds())
					}
					if late {
						rule.Leg = table.of
					}
					first := b.d[0]
					if table.of == refengine.LegProbe {
						first = b.p[0]
					}
					if rule.Fault == "" {
						first.Kill()
					} else {
						require.NoError(t, first.SetFaults(rule))
					}
					prompt, want := short, row.streamed
					if rule.AfterTokens > 0 || rule.Fault == refengine.MissingFinish {
						prompt = long
					}
					if !stream && row.whole != "" {
						want = row.whole
					}
					got := b.judge(prompt, fmt.Sprintf(`"stream":%t,`, stream))
					b.settle()
					leads := late || table.of == refengine.LegProbe
					if rule.Fault != refengine.EmptyBlocks { // the reference engine keeps what it does not name
						require.LessOrEqual(t, b.pins(), b.orphans(), "what no engine fetches is on the prefill engine's account")
					}
					for _, d := range b.d {
						require.Zero(t, d.Stats().LocalPrefills)
					}
					if result := callbackOf[row.leg]; result != "" && table.connector == mooncake.AscendLayerwise {
						require.EqualValues(t, 1, b.metric(t, "evenkeel_bind_callbacks_total", result))
					}
					require.Equal(t, want, b.fate(got, b.asked[0], leads || table.connector == mooncake.AscendLayerwise, leads))
				})
			}
		}
	}
}
