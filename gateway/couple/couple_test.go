package couple

import (
	"errors"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/metaserver"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// Each connector with two engines that may bind before the prefill has a dialect, and no other.
func TestConnectorsThatHaveADialect(t *testing.T) {
	for _, name := range mooncake.Connectors() {
		p := mooncake.Profile{Connector: name}.WithDefaults()
		_, has := dialects[name]
		require.Equal(t, p.Early() && name != mooncake.None || name == mooncake.NIXLPush, has, name)
	}
	for name, d := range dialects {
		require.False(t, d.Aborts && d.Strands, "%s: what ends with an abort keeps nothing for ever", name)
		require.False(t, d.Retries && !d.CallsBack, "%s: another prefill engine can only be named to one that has not been named yet", name)
	}
}

// An answer that is lost before its end was as wrong as one that is whole, if its prefill was aborted.
func TestALostAnswerIsNotBelievedEither(t *testing.T) {
	for _, row := range []struct {
		name      string
		prefilled int
		closed    bool
		wrong     bool
	}{{"whole", 10, false, false}, {"lost", 10, true, false}, {"lost, and its prefill aborted", 5, true, true}} {
		t.Run(row.name, func(t *testing.T) {
			maker := &Maker{Config: Config{Settings: func() *fleet.Settings { return fleet.NewSettings(config.Default()) }}}
			d := dialects[mooncake.SGLang]
			p := &Partner{maker: maker, dialect: d, legs: lifecycle.NewLegs(d), over: make(chan struct{}), dead: make(chan struct{})}
			p.lease = &prefill.Lease{}
			for _, e := range []lifecycle.LegEvent{{What: lifecycle.ProbeDue}, {What: lifecycle.Began}} {
				p.legs.Step(e, nil)
			}
			p.legs.Step(lifecycle.LegEvent{What: lifecycle.PrefillDone, Prompt: row.prefilled}, nil)
			if row.closed {
				p.Close()
			}
			close(p.over)
			f := p.Believe(10, nil)
			require.Equal(t, row.wrong, f != nil)
			if f != nil {
				require.ErrorIs(t, f.Err, ErrBroken)
			}
		})
	}
}

// A callback and the end of the answer may come at the same moment, and be seen in either order. Its token is
// forgotten then.
func TestACallbackAtTheEndIsForgotten(t *testing.T) {
	for name, late := range map[string]bool{"the callback first": false, "the end first": true} {
		t.Run(name, func(t *testing.T) {
			meta := metaserver.New(metaserver.Config{Registerer: prometheus.NewRegistry(), Log: zap.NewNop(), Advertise: func() string { return "" }})
			d := dialects[mooncake.AscendLayerwise]
			p := &Partner{dialect: d, legs: lifecycle.NewLegs(d), dead: make(chan struct{}), Meeting: &mooncake.Meeting{}, expect: meta.Expect(metaserver.Wanted{})}
			p.legs.Step(lifecycle.LegEvent{What: lifecycle.Began}, nil)
			if late {
				p.Close()
			}
			require.False(t, p.calledBack(metaserver.Callback{Err: errors.New("bad")}, 0))
			p.Close()
			require.Zero(t, meta.Expected())
		})
	}
}
