package refengine

import (
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	"evenkeel/bench/lab/refengine/group"
	"evenkeel/bench/lab/refengine/pins"
	"evenkeel/bench/lab/reftext"
)

// keepsAnswer says whether the KV of an answer stays for a next turn, as with bidirectional_kv_xfer (vLLM 0.32 and 0.33,
// request_finished in nixl/pull_scheduler.py): of each request that came with a hand-off and that the engine's core ends. At a stop
// string the front end aborts the request, unless it has ended.
func (c Config) keepsAnswer(r *request, p plan) bool {
	return c.KV.KeepsAnswers > 0 && r.leg == LegDecode && (p.stopReason[0] != '"' || p.core == "length")
}

// back is the KV of an answer, which a prefill engine may fetch.
type back struct {
	engine string
	blocks []int
	ids    []int32
	free   func()
}

// backs are those of one engine, by the names of the requests. Only a fetch or the time ends one.
type backs struct {
	mu  sync.Mutex
	all map[string]*back
}

// fetch is a prefill engine's read, which ends a back.
func (k *backs) fetch(q pullRequest) (reply pullReply, ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	one := k.all[q.ID]
	if one == nil || one.engine != q.Engine {
		return pullReply{}, false
	}
	delete(k.all, q.ID)
	one.free()
	if !slices.Equal(q.Blocks, one.blocks) {
		return pullReply{State: pins.OK, Key: badKV}, true
	}
	return pullReply{State: pins.OK, Key: reftext.OfIDs(one.ids, nil).Key}, true
}

// handBack is what such an answer tells of its KV, which is there from then on.
func handBack(l *life, r *request, j *group.Job, name string, answer *uint64) func(made int) []byte {
	cfg := l.engine.cfg
	id, _ := json.Marshal(name) // a string always marshals
	return func(made int) []byte {
		tokens, registration := r.prompt.Tokens()+made-1, ""
		if !cfg.before(33) {
			registration = `"remote_registration_generation":1,`
		}
		one := &back{engine: l.engineID(r.rank), blocks: l.newBlocks(tokens), ids: slices.Clone(r.prompt.IDs), free: func() { l.group.Cancel(j) }}
		for i := range made - 1 {
			one.ids = append(one.ids, reftext.TokenID(*answer, r.prompt.Resumed+i))
		}
		l.backs.mu.Lock()
		l.backs.all[name] = one
		l.backs.mu.Unlock()
		return fmt.Appendf(nil, `{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":%s,"remote_engine_id":%q,"remote_request_id":%s,"remote_host":%q,"remote_port":%d,`+
			`"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":%d,"remote_blocks_expiry_time":%.3f,%s"transfer_mode":"pull"}`,
			blockList(one.blocks, false, r.troubles), one.engine, id, cfg.Server.Advertise, l.ports[l.portOf(r.rank)],
			tokens, float64(time.Now().Add(cfg.KV.KeepsAnswers).UnixMilli())/1000, registration)
	}
}

// fetchBack has a prefill engine fetch the KV of the turn before, and says how many tokens came. It compares none of them: of KV that is
// not its prompt's, it makes a hand-off with wrong content. Without bidirectional_kv_xfer the prompt waits for what nobody fetches
// (vLLM 0.33, get_num_new_matched_tokens and update_state_after_alloc in nixl/pull_scheduler.py).
func (l *life) fetchBack(x *exchange, r *request) (tokens int, err *apiError) {
	if l.engine.cfg.KV.KeepsAnswers == 0 {
		<-x.Ctx.Done()
		return 0, nil
	}
	reply, failure := l.sendPull(x.Ctx, r.kv.remote,
		pullRequest{ID: r.kv.remote.id, Engine: r.kv.remote.engine, Blocks: r.kv.remote.blocks, Back: true})
	if failure != nil || reply.State != pins.OK {
		l.engine.count.FailedPulls.Add(1)
		return 0, refuse(500, "KV load failure: %v", failure)
	}
	tokens = min(r.kv.tokens, r.prompt.Tokens())
	if reply.Key != reftext.OfIDs(r.prompt.IDs[:tokens], nil).Key {
		l.engine.count.KeyMismatches.Add(1)
		r.prompt.Key ^= badKV
	}
	l.prefills[r.rank].Asked.Add(int64(tokens))
	l.prefills[r.rank].Pulled.Add(int64(tokens))
	return tokens, nil
}

func (a *answer) appendHandBack(dst []byte, made int) []byte {
	if a.handBack == nil {
		return dst
	}
	return append(dst, a.handBack(made)...)
}

// giveUpLater gives a finished answer up after a while: nobody can fetch it, and then its blocks are free.
func giveUpLater(l *life, j *group.Job, name string) {
	time.AfterFunc(l.engine.cfg.KV.KeepsAnswers, func() {
		l.backs.mu.Lock()
		delete(l.backs.all, name)
		l.backs.mu.Unlock()
		if j.End.Load() == group.Finished {
			l.group.Cancel(j)
		}
	})
}
