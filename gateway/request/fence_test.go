package request

import (
	"crypto/tls"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/owner"
	"evenkeel/gateway/owner/ownertest"
	"evenkeel/mooncake"
)

func at(t *testing.T, s *httptest.Server) *url.URL {
	u, err := url.Parse(s.URL)
	require.NoError(t, err)
	return u
}

// opened is what comes of a decode request without a hand-off to a rank.
func opened(t *testing.T, to *roster.Rank) *failure.Fault {
	to.Target.ID, to.Target.Rank = "d", -1
	set := fleet.NewSettings(config.Default())
	engines := &engines{frees: true, calls: calls(t)}
	srv := &Server{Deps: Deps{
		Log: zap.NewNop(), Client: engine.NewClient(engine.Options{}), Monitor: &monitor{}, Fleet: engines,
		Engines:  func() Engines { return engines },
		Settings: func() *fleet.Settings { return set },
	}}
	defer srv.Client.Close()
	body, err := mooncake.ScanBody([]byte(`{"model":"m","messages":[]}`), 10)
	require.NoError(t, err)
	j := &job{srv: srv, req: &openai.Request{Endpoint: mooncake.Chat}, body: body, client: edge.NewCloseNotifier(zap.NewNop()), isLeg: true,
		incoming: &Incoming{}}
	j.record = new(journal.Journal).Begin(journal.LogEntry{})
	s := &stream{job: j, upstream: upstreamCall{job: j, rank: to, slot: new(dispatcher.Slot), call: srv.Client.NewCall(to.Target),
		began: time.Now()}}
	return s.open(nil, lifecycle.ByFirstEvent)
}

// A request whose group goes while its connection is made is not written.
func TestARequestIsNotWrittenOnAConnectionThatCameTooLate(t *testing.T) {
	var asked atomic.Int32
	engineServer := httptest.NewTLSServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
	defer engineServer.Close()
	a, claim := ownertest.Owned(t, 2)
	handshake := engineServer.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
	handshake.VerifyConnection = func(tls.ConnectionState) error {
		return claim.GiveBack(2, func() {})
	}
	fault := opened(t, &roster.Rank{Signs: engine.NewLiveness(), Target: &engine.Target{URL: at(t, engineServer), TLS: handshake},
		Profile: &mooncake.Profile{}, Scope: a})
	require.ErrorIs(t, fault.Err, owner.ErrNotOwner)
	require.Equal(t, lifecycle.Anew, fault.Verdict().Next, "it goes to who has the group now")
	require.Equal(t, lifecycle.Keep, fault.Verdict().KV, "with its hand-off, if the group is ours again")
	require.Zero(t, asked.Load())
	require.Zero(t, a.Sending())
}
