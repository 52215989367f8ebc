package passthrough

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
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/request"
	"evenkeel/gateway/upstream"
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
	life lifecycle.Lifecycle

	tried  []string
	to     fleet.Whole // the engine that was chosen last
	answer *answer     // of the last call
	fault  *failure.Fault
	before *failure.Fault // the last but one
	none   *openai.Error  // why there is no engine
}

// run tells the request's life of an event, and carries out what is to be done then. It returns once the answer has begun, or has
// ended. An error is for the client.
func (j *job) run(e lifecycle.Event) *openai.Error {
	var room [8]lifecycle.Effect
	todo := room[:0]
	defer func() { // what was to be given up when something panicked, and what is held still
		if v := recover(); v != nil {
			for _, x := range slices.Concat(todo, j.life.Step(lifecycle.Event{What: lifecycle.Panicked}, nil)) {
				if x.Do == lifecycle.Settle {
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
			case x.Do == lifecycle.Fail && x.Error == lifecycle.OfClient:
				j.in.Record.EndAttempt(failure.Gone())
				return failure.Gone()
			case x.Do == lifecycle.Fail && x.Error == lifecycle.OfAttempt:
				return j.fault.Answer
			case x.Do == lifecycle.Fail:
				return cmp.Or(j.none, errNoRoute) // no engine was looked for if as many were asked as may be
			case x.Do == lifecycle.EndWhole, x.Do == lifecycle.BreakOff:
				j.settle(j.answer.fail)
				return nil
			case x.Do == lifecycle.AnswerIt:
				return nil
			}
			e = j.do(x)
		}
	}
}

// do carries an effect out. Of one that is waited for, it returns how it ended.
func (j *job) do(x lifecycle.Effect) (e lifecycle.Event) {
	told := j.in.Record
	switch x.Do {
	case lifecycle.Settle:
		j.giveUp(x.Thing, x.How)
	case lifecycle.Remember:
		j.srv.without(j.to.Instance, j.path)
	case lifecycle.Recall:
		j.fault = j.before
	case lifecycle.Complain:
		j.srv.Log.Warn("an engine did not answer a request that was passed through to it", zap.String("request_id", told.ID), zap.String("endpoint", j.path),
			zap.String("engine", j.to.Instance), zap.Int("attempt", told.Attempts), zap.Int("status", j.fault.Status), zap.Error(j.fault.Err))
	case lifecycle.Choose:
		j.to, j.none = j.srv.choose(j.req.Model, j.path, j.tried)
		switch j.none {
		case nil:
			j.tried = append(j.tried, j.to.Instance)
			e.What = lifecycle.Chosen
		case errNoRoute:
			e.What = lifecycle.NoRoute
		default:
			e.What = lifecycle.NoneLeft
		}
	case lifecycle.SendAnew:
		j.srv.count(j.to.Instance, 1)
		return j.call(true)
	case lifecycle.SendOver:
		return j.call(false)
	default: // run does the others, and some are not of this script
	}
	return e
}

// call sends the request to the engine that was chosen, over a new connection if anew is set, and says what came of it.
func (j *job) call(anew bool) lifecycle.Event {
	j.answer = &answer{job: j}
	told := j.in.Record
	if told.Attempts > 0 {
		told.Report(journal.Event{What: journal.Retried})
	}
	told.Report(journal.Event{What: journal.Attempted})
	told.Report(journal.Event{What: journal.Entered, Phase: journal.Transfer, Left: j.conn.Left(), Call: "pass", Engine: j.to.ID})
	f := j.open(anew)
	switch {
	case f == nil:
		return lifecycle.Event{What: lifecycle.First}
	case j.answer.run.Moved() && !j.conn.Left():
		f = failure.Of(f.Ended, j.drained(), failure.ErrMoved)
		f.Moved = true
	}
	on := ""
	if f.OfEngine() {
		on = j.to.ID
	}
	told.Report(journal.Event{What: journal.Failed, Cause: f.Cause(), On: on, Status: f.Status, Answer: f.Answer})
	j.before, j.fault = j.fault, f
	return lifecycle.Event{What: lifecycle.Fell, End: f.Ended}
}

// open sends the request, and reads its answer or the beginning of it.
func (j *job) open(anew bool) (f *failure.Fault) {
	began, limits := time.Now(), &j.srv.Settings().Limits
	headers, body := engine.JSONHeaders("ek-"+j.in.Record.ID+"-x"+strconv.Itoa(j.in.Record.Attempts)), [][]byte{j.raw}
	if hears(j.path) {
		headers[0].Value = j.kind
	} else {
		body = j.req.Body.Splice(nil, mooncake.Reserved, nil)
	}
	a := j.answer
	a.call = upstream.Call{
		Call: j.srv.Client.NewCall(j.to.Target), Leg: lifecycle.Sole, Engine: j.to.Instance, Path: j.path,
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
	j.conn.OnGone(func() { a.call.Leave(upstream.Notice) })
	switch a.resp, f = a.call.Open(j.in.Record.Carry(headers), body); {
	case f == nil:
		return a.read(began)
	case f.Status > 0:
		return a.refused(f)
	}
	return a.broke(f)
}

func (j *job) giveUp(t lifecycle.Thing, how lifecycle.How) {
	a, told := j.answer, j.in.Record
	switch {
	case t == lifecycle.Seat:
		j.seat.Give()
	case t == lifecycle.Body && how == lifecycle.Back: // no engine is sent it any more
		j.raw, j.req.Body = nil, mooncake.Body{}
		j.in.Body.Give()
	case t == lifecycle.Memory && how == lifecycle.Back:
		a.room.Give()
	case t == lifecycle.Call:
		j.conn.OnGone(nil)
		if a.resp != nil {
			a.resp.Close()
		}
		j.srv.Fleet.Untrack(a.run)
		j.srv.count(j.to.Instance, -1)
		if how == lifecycle.Spent && told.PromptTokens+told.OutputTokens == 0 { // what no engine counts is not free
			told.PromptTokens = Estimate(j.path, j.req)
		}
		if computes(j.path) {
			computed := cmp.Or(a.prompt, a.expects)
			if how == lifecycle.Free {
				computed = 0
			}
			j.to.Traffic.Settles(a.expects, computed)
			j.to.Traffic.Beyond(-1)
		}
		if j.conn.Left() {
			told.Report(journal.Event{What: journal.Freed, At: j.conn.GoneAt()})
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
	j.in.Record.EndAttempt(fail)
	j.srv.took.WithLabelValues(j.path).Observe(time.Since(j.in.Record.Arrival).Seconds())
	j.srv.Requests.Account(j.in, fail)
}
