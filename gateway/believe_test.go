package gateway_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/refengine"
	"evenkeel/gateway/config"
)

// unconfirmed is a prefill engine of SGLang that hands its KV over and never ends its answer.
var unconfirmed = refengine.Rule{Fault: refengine.Hang, Phase: refengine.PhaseMidStream, Leg: refengine.LegProbe}

// When a decode engine has ended an answer, its slot is free, even if the prefill engine has not said yet that the KV was
// whole. If the client leaves then, nothing stays charged.
func TestADecodeThatHasEndedHoldsNoSlotForItsPrefill(t *testing.T) {
	t.Parallel()
	c := early(t, refengine.SGLang, options{
		decode: []refengine.Config{{Slots: 2}}, dirty: true,
		configure: func(cfg *config.Config) { cfg.Bind.Grace, cfg.Bind.Confirm = time.Minute, time.Millisecond },
	})
	require.NoError(t, c.prefill[0].SetFaults(unconfirmed))
	used := func() int { return c.rank(c.decode[0]).Used }
	decodes := int64(1)
	for name, more := range map[string]string{"streamed": streamed, "in one piece": ""} {
		t.Run(name, func(t *testing.T) {
			leave, wait := c.send(chat("one two three", more))
			c.eventually("the request has its slot", func() bool { return c.decode[0].Stats().Decodes == decodes })
			decodes++
			c.eventually("the slot is free again", func() bool { return used() == 0 })
			require.EqualValues(t, 1, c.metric("evenkeel_requests_open"), "it waits for the prefill engine")
			leave()
			wait()
			c.eventually("nothing is left of it", func() bool { return c.metric("evenkeel_requests_open") == 0 && c.prefill[0].Stats().Running == 0 })
			c.eventually("the prefill leg has ended, too", func() bool { return c.candidates()[0].Inflight == 0 })
		})
	}
}

// The wait for the prefill engine's confirmation has a bound of its own. An answer that is not confirmed by then ends with
// an error.
func TestAnAnswerThatIsNotConfirmedInTimeEndsWithAnError(t *testing.T) {
	t.Parallel()
	const grace = 3 * time.Second // a right answer is confirmed in time on a loaded machine, too
	c := early(t, refengine.SGLang, options{dirty: true, configure: func(cfg *config.Config) { cfg.Bind.Grace, cfg.Bind.Confirm = grace, time.Millisecond }})
	require.NoError(t, c.prefill[0].SetFaults(unconfirmed))
	r := c.post(chatPath, chat("one two three", streamed))
	require.Equal(t, http.StatusOK, r.status, r.body)
	require.Equal(t, "prefill_timeout", read(t, r.body).fail)
	r = c.post(chatPath, chat("one two three", ""))
	require.Equal(t, http.StatusGatewayTimeout, r.status, r.body)
	require.Contains(t, r.body, "prefill_timeout")
	require.NoError(t, c.prefill[0].SetFaults())
	require.Equal(t, "right", c.judge("one two three", streamed))
}

// If a prefill engine stands still, the slot of a client that has left is free after bind.grace. The decode engine may keep
// blocks for KV that comes late, so their room stays charged.
func TestAPrefillThatStandsStillHoldsNoSlotOfAClientThatLeft(t *testing.T) {
	t.Parallel()
	for _, connector := range earlyConnectors {
		t.Run(string(connector), func(t *testing.T) {
			t.Parallel()
			c := early(t, connector, options{
				decode: []refengine.Config{{Slots: 2}}, dirty: true,
				configure: func(cfg *config.Config) { cfg.Bind.Grace = 300 * time.Millisecond },
			})
			require.Equal(t, "right", c.judge("warm", streamed))
			require.NoError(t, c.prefill[0].SetFaults(standsStill(time.Hour)))
			for range 2 {
				leave, wait := c.send(chat("one two three", streamed))
				c.eventually("its prefill is under way", func() bool { return c.prefill[0].Stats().Running > 0 })
				leave()
				wait()
			}
			c.eventually("both slots are free", func() bool { return c.rank(c.decode[0]).Used == 0 })
			c.eventually("nothing is open", func() bool { return c.metric("evenkeel_requests_open") == 0 })
			require.NoError(t, c.prefill[0].SetFaults())
			c.eventually("it serves again", func() bool { return c.judge("four five six", streamed) == "right" })
		})
	}
}
