package refengine

import (
	"encoding/json"
	"errors"
	"net"
	"slices"
	"strconv"
	"time"

	"evenkeel/bench/lab/refengine/bind"
	"evenkeel/bench/lab/refengine/group"
	"evenkeel/bench/lab/refengine/pins"
	"evenkeel/bench/lab/refengine/prompts"
)

// written: prefill engines write KV into the decode engine, which therefore takes part before the prefill ends.
func (c Connector) written() bool { return c == AscendLayerwise || c == SGLang || c == NIXLPush }

// bound is what an engine has for requests that are bound to a decode engine before their prefill.
type bound struct {
	*life
	desk     *bind.Desk
	landings *bind.Landings
	callers  []*bind.Caller // of the ranks
	rids     bind.Running

	controller bind.Controller
}

func newBound(l *life) *bound {
	c := &l.engine.count
	counts := bind.Counts{Callbacks: &c.Callbacks, Pushes: &c.Pushes, LostPushes: &c.LostPushes, MixedPushes: &c.MixedPushes,
		FreedWrites: &c.FreedWrites, RoomTimeouts: &c.RoomTimeouts}
	b := &bound{life: l, desk: bind.NewDesk(), landings: bind.NewLandings(counts)}
	b.controller.Ranks, b.controller.Follows = l.engine.cfg.DPSize, l.engine.cfg.SGLang.LoadBalance == followRoom
	for range l.engine.cfg.DPSize {
		b.callers = append(b.callers, bind.NewCaller(l.pull, counts))
	}
	return b
}

// layerwiseWorkers is how many workers of a prefill engine tell a layerwise decode engine that
// their part is written.
const layerwiseWorkers = 2

// badHost is a host in a hand-off or a callback that is none of the engines.
const badHost = "203.0.113.7"

// baseID is what both legs of a request have in common: an engine's own id less the random suffix.
func (r *request) baseID() string {
	switch {
	case r.room != nil:
		return strconv.FormatInt(r.room.ID, 10)
	case r.chat:
		return r.id
	}
	return r.id + "-0"
}

// compute prefills a request's prompt. free gives its blocks back. ok is false when the
// client left before the end, and the blocks are free then.
func (b *bound) compute(x *exchange, r *request) (cached int, free func(), ok bool) {
	type outcome struct {
		cached int
		free   func()
	}
	done, ctx := make(chan outcome), x.Ctx
	b.prefills[r.rank].Add(&prompts.Job{Ctx: ctx, IDs: r.prompt.IDs, Salt: r.salt, Done: func(cached int, free func()) {
		select {
		case done <- outcome{cached, free}:
		case <-ctx.Done():
			free()
		}
	}})
	select {
	case o := <-done:
		b.engine.count.Tokens.Add(1)
		b.group.Gauges(r.rank).Prefilled(r.prompt.Tokens(), 1)
		return o.cached, o.free, true
	case <-ctx.Done():
		return 0, nil, false
	}
}

// transfer waits as long as KV is on its way; false: the client left meanwhile.
func (b *bound) transfer(x *exchange, r *request) bool { return x.Pause(b.transferTime(r)) }

func (b *bound) transferTime(r *request) time.Duration {
	cfg := b.engine.cfg
	return cfg.KV.TransferBase + time.Duration(r.prompt.Tokens())*cfg.KV.TransferPer
}

// push is the word of a prefill engine's first worker about a request's KV.
func (b *bound) push(r *request, cached int) bind.Push {
	p := bind.Push{ID: r.baseID(), Sender: b.engineID(r.rank), Key: r.prompt.Key, Answer: r.prompt.Answer, Cached: cached,
		Failed: r.troubles.has(FailedSent)}
	if r.room != nil {
		p.Sampled = r.room.Sampled
	}
	return p
}

// tell sends a worker's word. It is lost for good if nobody is there.
func (b *bound) tell(r *request, address string, p bind.Push) {
	if !r.troubles.has(DoneLost) {
		_ = bind.Post(b.ctx, b.pull, address, bind.PushPath, p)
	}
}

// prefillLayerwise prefills, and writes the KV to where the decode engine's callback said. It keeps
// nothing.
func (b *bound) prefillLayerwise(x *exchange, r *request) bool {
	cached, free, ok := b.compute(x, r)
	if !ok {
		return false // and nobody tells the decode engine
	}
	defer free()
	b.writeLayer(r, cached, 0)
	if !b.transfer(x, r) {
		return false
	}
	if !r.troubles.has(DoneLost) {
		b.writeLayer(r, cached, layerwiseWorkers-1)
	}
	a := b.newAnswer(x, r, r.firstOf(r.plan(r.prompt.Answer)))
	a.cached = cached
	return a.whole(a.want, a.finish, a.stopReason, nil)
}

// writeLayer has a worker write its part to where the decode engine's callback said.
func (b *bound) writeLayer(r *request, cached, worker int) {
	p, to := b.push(r, cached), r.kv.remote
	p.To, p.Blocks, p.Worker = to.engine, to.blocks, worker
	_ = bind.Post(b.ctx, b.pull, to.address, bind.PushPath, p)
}

// writeHalf is what a layerwise prefill engine has done when it fails after it took a request: one
// of its workers has written. Another prefill engine must not go on with the same decode request.
func (b *bound) writeHalf(r *request) {
	if b.engine.cfg.Connector == AscendLayerwise && r.leg == LegProbe {
		b.writeLayer(r, 0, 0)
	}
}

// firstOf is a plan of which only the first token is told.
func (r *request) firstOf(p plan) plan {
	p.want, p.finish, p.core, p.stopReason = 1, "length", "length", "null"
	if p.ends != nil {
		p.text = p.text[:min(len(p.text), p.ends[0])]
	}
	return p
}

// keepUntilAsked pins a prefill of the NIXL that pushes, and writes it once a decode engine
// registers for it.
func (b *bound) keepUntilAsked(r *request, k *pins.Pin, cached int) {
	came, leave := b.desk.Await(k.ID)
	ended, free := make(chan struct{}), k.Free
	k.Free = func() { close(ended); free() }
	b.pins.Add(k)
	b.wg.Go(func() {
		defer leave()
		select {
		case to := <-came:
			select {
			case <-ended: // it came too late, and waits
				return
			default:
			}
			p := b.push(r, cached)
			p.Begins = true
			_ = bind.Post(b.ctx, b.pull, to.Address, bind.PushPath, p) // one that is gone does not answer, and is told in vain below
			p.Begins = false
			switch b.pins.Written(k.ID, to.Engine) {
			case pins.OK:
			case pins.Expired: // while it was written: the rest of it is another prompt's, and nothing shows it
				p.Key, p.Answer = ^p.Key, p.Answer^badKV
			default:
				return // it waits for the engine that was here before, and does not learn that this one is another
			}
			b.desk.Spend(p)
			b.tell(r, to.Address, p)
		case <-ended:
		case <-b.ctx.Done():
		}
	})
}

// serveRegister is a prefill engine's end of a registration.
func (b *bound) serveRegister(x *exchange) bool {
	var q bind.Registration
	if err := json.Unmarshal(x.Body, &q); err != nil || q.ID == "" {
		return x.fail(refuse(400, "registration: needs an id"))
	}
	if !b.finds(q) {
		return serveOK(b.life, x) // and the decode engine waits
	}
	if old, again := b.desk.Register(q); again {
		b.engine.count.Replays.Add(1)
		b.wg.Go(func() { _ = bind.Post(b.ctx, b.pull, q.Address, bind.PushPath, old) })
	}
	return serveOK(b.life, x)
}

// servePush is a decode engine's end of a write.
func (b *bound) servePush(x *exchange) bool {
	var p bind.Push
	if err := json.Unmarshal(x.Body, &p); err != nil || p.ID == "" {
		return x.fail(refuse(400, "push: needs an id"))
	}
	if b.engine.cfg.Connector == NIXLPush {
		b.engine.core.Wait(b.ctx) // which drives the transfer
	}
	switch {
	case p.Begins:
	case !p.Failed:
		b.landings.Land(p)
	case b.engine.cfg.Connector == SGLang:
		b.landings.FailID(p.ID, errors.New("the prefill engine has failed"))
	} // vLLM marks the blocks as invalid, but no request is reported that has received them: it waits for ever
	return serveOK(b.life, x)
}

// awaitKV waits for KV blocks, and then until the prompt's KV was written into them. A request that
// has blocks tells where they are, though its client may have left meanwhile. The results are those
// of fetchKV.
func (b *bound) awaitKV(x *exchange, r *request, j *group.Job, a *answer, right uint64) (key uint64, local bool, err *apiError) {
	connector := b.engine.cfg.Connector
	if !waitFor(a, j.Granted) {
		if connector == NIXLPush && b.engine.core.Stands() {
			b.readLate(a, r, j)
		}
		return 0, false, nil
	}
	if r.room != nil && r.room.Fake { // it decodes on pages that were never written, after a token that was never sampled
		return right ^ badKV, false, nil
	}
	cached, _ := b.prefills[r.rank].Cache.Match(r.salt, r.prompt.IDs)
	switch {
	case r.kv.virtual: // the blocks are believed to be filled
		return right ^ badKV, false, nil
	case connector == SGLang:
	case r.troubles.has(CallbackEmpty) || cached+1 >= r.prompt.Tokens(): // the last token is always computed
		if connector == AscendLayerwise {
			b.callBack(r, nil)
		}
		return right, false, nil
	}
	workers := 1
	if connector == AscendLayerwise {
		workers = layerwiseWorkers
	}
	landing := b.landings.Open(r.baseID(), b.engineID(r.rank), r.rank, workers)
	var blocks []int
	switch connector {
	case AscendLayerwise:
		blocks = b.newBlocks(r.prompt.Tokens())
		b.callBack(r, blocks)
	case NIXLPush:
		b.register(r)
	case SGLang:
		b.joinRoom(x, r, landing)
	}
	if !waitFor(a, landing.Done()) {
		b.desert(a, j, landing)
		return 0, false, nil
	}
	a.spoilt = landing.Spoilt()
	return b.landed(a, landing, blocks, right)
}

// register tells a pushing prefill engine where a request's KV goes. If that engine is gone, nobody
// says so.
func (b *bound) register(r *request) {
	_ = bind.Post(b.ctx, b.pull, r.kv.remote.address, bind.RegisterPath,
		bind.Registration{ID: r.baseID(), Engine: r.kv.remote.engine, Address: b.address(r.rank), Rank: -1})
}

// readLate is what becomes of a request whose client has left while the core stood still: the core
// reads the request, gives it blocks and registers for its KV, before it reads that the client has
// left. vLLM 0.32.0 did so with two or three of four requests.
func (b *bound) readLate(a *answer, r *request, j *group.Job) {
	landing := b.landings.Open(r.baseID(), b.engineID(r.rank), r.rank, 1)
	a.letGo = func() {}
	b.wg.Go(func() {
		select {
		case <-j.Granted:
			if b.landings.Orphan(landing, func() { b.group.Cancel(j) }) { // before any prefill engine can write
				b.group.Strand(j)
			}
			b.register(r)
		case <-b.ctx.Done():
		}
	})
}

// landed says what will be decoded of the KV that was written.
func (b *bound) landed(a *answer, landing *bind.Landing, blocks []int, right uint64) (key uint64, local bool, err *apiError) {
	count, r := &b.engine.count, a.r
	p, whole, failure := landing.Result()
	if r.room != nil {
		a.cached = p.Cached // not the whole prompt
	}
	switch {
	case failure != nil:
		count.FailedPulls.Add(1)
		if r.room != nil {
			return 0, false,
				refuse(500, "Decode transfer failed for request with exception KVTransferError(bootstrap_room=%d): %v", r.room.ID, failure)
		}
		return 0, false, refuse(500, "KV load failure: %v", failure)
	case p.Key != r.prompt.Key: // the other request's answer
		count.KeyMismatches.Add(1)
		return p.Answer, false, nil
	case !slices.Equal(p.Blocks, blocks):
		count.WrongBlocks.Add(1)
	case r.room != nil && p.Sampled != r.room.Sampled: // the first token is another one
		count.SampledApart.Add(1)
	case whole && !r.troubles.has(WrongKey):
		return right, false, nil
	}
	return right ^ badKV, false, nil
}

// desert is what becomes of the blocks of a request whose client left while their KV was on its
// way. SGLang gives them away at once. The others keep them until all is written, which is for ever
// if no prefill engine does so.
func (b *bound) desert(a *answer, j *group.Job, landing *bind.Landing) {
	if b.engine.cfg.Connector == SGLang {
		b.landings.Free(landing)
		return
	}
	if b.landings.Orphan(landing, func() { b.group.Cancel(j) }) {
		a.letGo = func() {}
		b.group.Strand(j)
	}
}

// newBlocks are the numbers of blocks for so many tokens.
func (l *life) newBlocks(tokens int) (list []int) {
	n := blocks(tokens)
	first := int(l.blockIDs.Add(int64(n))) - n
	for i := range n {
		list = append(list, (first+i)%(1<<20))
	}
	return list
}

// address is where a rank is reached.
func (b *bound) address(rank int) string {
	return net.JoinHostPort(b.engine.cfg.Server.Advertise, strconv.Itoa(b.ports[b.portOf(rank)]))
}

// callBack tells the proxy where the KV of a request goes, and does not wait for the answer.
// Without blocks nothing is needed.
func (b *bound) callBack(r *request, blocks []int) {
	id, host := r.baseID(), b.engine.cfg.Server.Advertise
	if r.troubles.has(CallbackShortID) { // where ids have no suffix, as much of the proxy's own is cut off
		id = id[:max(0, len(id)-9)]
	}
	if r.troubles.has(CallbackBadHost) {
		host = badHost
	}
	times := 1
	switch {
	case r.troubles.has(NoCallback):
		return
	case r.troubles.has(CallbackTwice):
		times = 2
	}
	callback := bind.NewCallback(id, b.engineID(r.rank), host, b.ports[b.portOf(r.rank)], blockSize, blocks)
	if r.troubles.has(CallbackNewKey) {
		callback.RemotePPSize = 1
	}
	body, _ := json.Marshal(callback) // strings and numbers always marshal
	late, _ := r.troubles.find(CallbackLate, "")
	b.wg.Go(func() { // it goes out though the client leaves
		select {
		case <-time.After(late.delay()):
		case <-b.ctx.Done():
		}
		for range times {
			b.callers[r.rank].Call(b.ctx, r.kv.metaserver, body)
		}
	})
}
