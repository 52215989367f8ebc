package through

import (
	"cmp"
	"slices"
	"strconv"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/leg"
	"evenkeel/gateway/life"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/request"
	"evenkeel/mooncake"
)

// A job is one request, with the things that its life only knows of.
type job struct {
	srv  *Server
	in   *request.Incoming
	req  *openai.Request
	path string
	conn *edge.Conn
	raw  []byte
	kind string       // Content-Type of a form
	seat *edge.Charge // among the requests that are passed through at once
	life life.Passed

	tried  []string
	to     fleet.Whole // the engine that was chosen last
	answer *answer     // of the last call
	fault  *failure.Fault
	before *failure.Fault // the last but one
	none   *openai.Error  // why there is no engine
}

// run tells the request's life of an event, and carries out what is to be done then. It returns once the answer has begun, or has
// ended. An error is for the client.
func (j *job) run(e life.PassedEvent) *openai.Error {
	var room [8]life.PassedEffect
	todo := room[:0]
	defer func() { // what was to be given up when something panicked, and what is held still
		if v := recover(); v != nil {
			for _, x := range slices.Concat(todo, j.life.Step(life.PassedEvent{What: life.PassPanicked}, nil)) {
				if x.Do == life.GiveUp {
					j.do(x)
				}
			}
			panic(v)
		}
	}()
	for {
		e.Left = j.conn.Left()
		if todo = j.life.Step(e, room[:0]); len(todo) == 0 {
			return nil // it has ended before
		}
		for len(todo) > 0 {
			x := todo[0]
			switch todo = todo[1:]; {
			case x.Do == life.TurnAway && x.Error == life.OfClient:
				j.in.Told.EndAttempt(failure.Gone())
				return failure.Gone()
			case x.Do == life.TurnAway && x.Error == life.OfAttempt:
				return j.fault.Answer
			case x.Do == life.TurnAway:
				return cmp.Or(j.none, errNoRoute) // no engine was looked for if as many were asked as may be
			case x.Do == life.Account:
				j.settle(j.answer.fail)
				return nil
			case x.Do == life.Hand:
				return nil
			}
			e = j.do(x)
		}
	}
}

// do carries an effect out. Of one that is waited for, it returns how it ended.
func (j *job) do(x life.PassedEffect) (e life.PassedEvent) {
	told := j.in.Told
	switch x.Do {
	case life.GiveUp:
		j.giveUp(x.Thing, x.How)
	case life.Remember:
		j.srv.without(j.to.Instance, j.path)
	case life.Recall:
		j.fault = j.before
	case life.Complain:
		j.srv.Log.Warn("an engine did not answer a request that was passed through to it", zap.String("request_id", told.ID), zap.String("endpoint", j.path),
			zap.String("engine", j.to.Instance), zap.Int("attempt", told.Attempts), zap.Int("status", j.fault.Status), zap.Error(j.fault.Err))
	case life.Choose:
		j.to, j.none = j.srv.choose(j.req.Model, j.path, j.tried)
		switch j.none {
		case nil:
			j.tried = append(j.tried, j.to.Instance)
			e.What = life.Chosen
		case errNoRoute:
			e.What = life.NoRoute
		default:
			e.What = life.NoneLeft
		}
	case life.SendAnew:
		j.srv.count(j.to.Instance, 1)
		return j.call(true)
	case life.SendOver:
		return j.call(false)
	case life.Hand, life.Account, life.TurnAway:
	}
	return e
}

// call sends the request to the engine that was chosen, over a new connection if anew is set, and says what came of it.
func (j *job) call(anew bool) life.PassedEvent {
	j.answer = &answer{job: j}
	told := j.in.Told
	if told.Attempts > 0 {
		told.Tell(journal.Event{What: journal.Retried})
	}
	told.Tell(journal.Event{What: journal.Attempted})
	told.Tell(journal.Event{What: journal.Entered, Phase: journal.Transfer, Left: j.conn.Left(), Call: "pass", Engine: j.to.ID})
	f := j.open(anew)
	switch {
	case f == nil && j.answer.whole != nil:
		return life.PassedEvent{What: life.CameWhole}
	case f == nil:
		return life.PassedEvent{What: life.Streams}
	case j.answer.run.Moved() && !j.conn.Left():
		f = failure.Of(f.Ended, j.drained(), failure.ErrMoved)
		f.Moved = true
	}
	on := ""
	if f.OfEngine() {
		on = j.to.ID
	}
	told.Tell(journal.Event{What: journal.Failed, Cause: f.Cause(), On: on, Status: f.Status, Answer: f.Answer})
	j.before, j.fault = j.fault, f
	return life.PassedEvent{What: life.CallFell, End: f.Ended}
}

// open sends the request, and reads its answer or the beginning of it.
func (j *job) open(anew bool) (f *failure.Fault) {
	began, limits := time.Now(), &j.srv.Settings().Limits
	headers, body := engine.JSONHeaders("ek-"+j.in.Told.ID+"-x"+strconv.Itoa(j.in.Told.Attempts)), [][]byte{j.raw}
	if hears(j.path) {
		headers[0].Value = j.kind
	} else {
		body = j.req.Body.Splice(nil, mooncake.Reserved, nil)
	}
	a := j.answer
	a.call = leg.Call{
		Call: j.srv.Client.NewCall(j.to.Target), Leg: life.Sole, Engine: j.to.Instance, Path: j.path,
		Limits: engine.Deadlines{Connect: limits.ConnectTimeout, FirstByte: limits.ProbeTimeout, Idle: limits.EventTimeout}, Log: j.srv.Log,
	}
	if anew {
		a.call.Fresh()
	}
	a.run = j.srv.Fleet.Track(fleet.Place{Instance: j.to.Instance, Rank: -1}, a.call.Call, true)
	if computes(j.path) {
		a.expects = int64(len(j.raw)) // no token has less than a byte
		j.to.Traffic.Beyond(1)
		j.to.Traffic.Sends(a.expects)
	}
	j.conn.OnGone(func() { a.call.Leave(leg.Notice) })
	switch a.resp, f = a.call.Open(j.in.Told.Carry(headers), body); {
	case f == nil:
		return a.read(began)
	case f.Status > 0:
		return a.refused(f)
	}
	return a.broke(f)
}

func (j *job) giveUp(t life.PassedThing, how life.How) {
	a, told := j.answer, j.in.Told
	switch {
	case t == life.Seat:
		j.seat.Give()
	case t == life.Body && how == life.Back: // no engine is sent it any more
		j.raw, j.req.Body = nil, mooncake.Body{}
		j.in.Body.Give()
	case t == life.Memory && how == life.Back:
		a.room.Give()
	case t == life.Call:
		j.conn.OnGone(nil)
		if a.resp != nil {
			a.resp.Close()
		}
		j.srv.Fleet.Untrack(a.run)
		j.srv.count(j.to.Instance, -1)
		if how == life.Spent && told.PromptTokens+told.OutputTokens == 0 { // what no engine counts is not free
			told.PromptTokens = Estimate(j.path, j.req)
		}
		if computes(j.path) {
			computed := cmp.Or(a.prompt, a.expects)
			if how == life.Free {
				computed = 0
			}
			j.to.Traffic.Settles(a.expects, computed)
			j.to.Traffic.Beyond(-1)
		}
		if j.conn.Left() {
			told.Tell(journal.Event{What: journal.Freed, At: j.conn.GoneAt()})
		}
	}
}

// drained is the answer to a request whose engine was taken out of service.
func (j *job) drained() *openai.Error {
	if j.srv.Serving().Err() != nil {
		return failure.Leaving()
	}
	return openai.Unavailable("engine_drained", "its engine was taken out of service; send the request again", 1)
}

// settle ends a request that was answered. fail is nil for an answer that was whole.
func (j *job) settle(fail *openai.Error) {
	j.in.Told.EndAttempt(fail)
	j.srv.took.WithLabelValues(j.path).Observe(time.Since(j.in.Told.Arrival).Seconds())
	j.srv.Requests.Account(j.in, fail)
}
