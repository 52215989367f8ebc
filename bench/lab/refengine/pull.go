package refengine

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"

	"evenkeel/bench/lab/refengine/group"
	"evenkeel/bench/lab/refengine/pins"
)

// The side channel between decode and prefill engines, on the prefill's own port.
const pullPath = "/kv/pull"

type pullRequest struct {
	ID      string `json:"id"`
	Engine  string `json:"engine_id,omitempty"`
	Blocks  []int  `json:"block_ids,omitempty"`
	Release bool   `json:"release,omitempty"` // free it, read nothing
	Renew   bool   `json:"renew,omitempty"`   // keep it a while longer
	Drain   bool   `json:"drain,omitempty"`   // its text is thrown away
}

// badKV is what an answer is off by whose KV was another prompt's.
const badKV = 0x2545f4914f6cdd1d

type pullReply struct {
	State pins.State `json:"state"`
	Key   uint64     `json:"key,string"`
}

// servePull is the prefill's end.
func (l *life) servePull(x *exchange) bool {
	var q pullRequest
	if err := json.Unmarshal(x.Body, &q); err != nil || q.ID == "" {
		return x.fail(refuse(400, "pull: needs an id"))
	}
	reply := pullReply{State: pins.OK}
	switch {
	case q.Renew:
		l.pins.Renew(q.ID)
	case q.Release:
		l.pins.Release(q.ID)
	default:
		reply.State, reply.Key = l.pins.Pull(q.ID, q.Engine, q.Blocks, q.Drain)
	}
	return x.answerJSON(reply)
}

// fetchKV waits for KV blocks, then pulls the prompt's KV. answer is what will
// be decoded: another one than the prompt's where the KV was not the prompt's.
// local: nothing came, the group must prefill. right is the answer of KV that came
// as it should.
func (l *life) fetchKV(x *exchange, r *request, j *group.Job, a *answer, right uint64) (key uint64, local bool, err *apiError) {
	cfg, count := l.engine.cfg, &l.engine.count
	if !waitFor(a, j.Granted) {
		return 0, false, nil
	}
	if !waitFor(a, time.After(cfg.KV.TransferBase+time.Duration(r.prompt.Tokens())*cfg.KV.TransferPer)) {
		return 0, false, nil
	}
	for {
		l.engine.core.Wait(x.Ctx)
		if x.Ctx.Err() != nil { // the core has its abort before it looks at the request
			return 0, false, nil //nolint:nilerr // the client left: there is nobody to tell
		}
		if r.troubles.has(TransferFails) { // the prefill engine is not told, and keeps the KV
			count.FailedPulls.Add(1)
			return 0, false, refuse(500, "KV load failure: the transfer failed")
		}
		reply, failure := l.pullOnce(x, r.kv.remote,
			pullRequest{ID: r.kv.remote.id, Engine: r.kv.remote.engine, Blocks: r.kv.remote.blocks, Drain: r.drains()})
		if x.Ctx.Err() != nil {
			return 0, false, nil //nolint:nilerr // the client left: there is nobody to tell
		}
		switch {
		case r.troubles.has(LostKV):
			return right, true, nil
		case failure != nil:
			count.FailedPulls.Add(1)
			return 0, false, refuse(500, "KV load failure: %v", failure)
		case reply.State == pins.OK && reply.Key == r.prompt.Key && !r.troubles.has(WrongKey):
			return right, false, nil
		case reply.State == pins.OK:
			count.KeyMismatches.Add(1)
			return right ^ reply.Key ^ 0x9e3779b97f4a7c15, false, nil
		case reply.State == pins.Unknown && cfg.Connector == VLLMMooncake: // waits for the prefill to be ready
			if !waitFor(a, time.After(20*time.Millisecond)) {
				return 0, false, nil
			}
		case reply.State == pins.Unknown:
			count.Unknown.Add(1)
			return right, true, nil
		default: // expired or replayed: recycled blocks, and no error anywhere
			return right ^ badKV, false, nil
		}
	}
}

// pullEnds is how long a pull that is under way may go on once its client has left.
const pullEnds = 5 * time.Second

// pullOnce sends a pull and waits for its end even if the client leaves: what an engine still reads
// when it has let go of a request could be another prompt's KV by then.
func (l *life) pullOnce(x *exchange, to remote, q pullRequest) (pullReply, error) {
	ctx, cancel := context.WithCancel(l.ctx)
	defer cancel()
	defer context.AfterFunc(x.Ctx, func() { time.AfterFunc(pullEnds, cancel) })()
	return l.sendPull(ctx, to, q)
}

// renew has the prefill keep the KV of a request that waits in our queue, as NIXL's
// decode side does: a heartbeat every sixth of the lease, from when the request came
// until its pull begins.
func (l *life) renew(x *exchange, r *request, j *group.Job) (stop func()) {
	cfg := l.engine.cfg
	if cfg.Connector != NIXLPull && cfg.Connector != NIXLPush || cfg.KV.NoRenewals {
		return func() {}
	}
	done, ctx := make(chan struct{}), x.Ctx // which is another one once the answer is over
	l.wg.Go(func() {
		beat := time.NewTicker(max(cfg.KV.HoldTimeout/6, time.Millisecond))
		defer beat.Stop()
		for {
			select {
			case <-beat.C:
				l.engine.core.Wait(ctx)
				_, _ = l.sendPull(ctx, r.kv.remote, pullRequest{ID: cmp.Or(r.kv.remote.name, r.kv.remote.id), Renew: true})
			case <-j.Granted:
				return
			case <-done:
				return
			case <-ctx.Done():
				return
			}
		}
	})
	return func() { close(done) }
}

func (l *life) sendPull(ctx context.Context, to remote, q pullRequest) (reply pullReply, err error) {
	body, err := json.Marshal(q)
	if err != nil {
		return reply, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+to.address+pullPath, bytes.NewReader(body))
	if err != nil {
		return reply, err
	}
	resp, err := l.pull.Do(req)
	if err != nil {
		return reply, err
	}
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(io.LimitReader(resp.Body, 1<<16))
	if err != nil {
		return reply, err
	}
	if resp.StatusCode != http.StatusOK {
		return reply, fmt.Errorf("prefill %s: status %d", to.address, resp.StatusCode)
	}
	err = json.Unmarshal(data, &reply)
	return reply, err
}

// notify tells the prefill that its KV will not be read: the "empty receive"
// of a rejected decode request.
func (l *life) notify(r *request) {
	connector := l.engine.cfg.Connector
	if r.leg != LegDecode || r.kv.remote.missing != "" || connector == AscendLayerwise || connector == SGLang {
		return
	}
	_, _ = l.sendPull(l.ctx, r.kv.remote, pullRequest{ID: r.kv.remote.id, Release: true})
}
