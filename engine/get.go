package engine

import (
	"context"
	"errors"
	"net/http"
)

// Get reads a whole small answer (health, models, metrics) of at most limit bytes, bounded by ctx.
// If the connection is stale, the request is sent once more on a new one, because a GET may be
// repeated.
func (c *Client) Get(ctx context.Context, t *Target, path string, limit int, hdr ...Header) (status int, body []byte, err error) {
	return c.NewCall(t).ask(ctx, http.MethodGet, path, limit, hdr...)
}

// ask reads a whole small answer, as Get does, with any method, because engines accept some of
// these requests only as a POST. The request has no body and no deadline other than the end of ctx,
// which aborts the call.
func (k *Call) ask(ctx context.Context, method, path string, limit int, hdr ...Header) (status int, body []byte, err error) {
	stop := context.AfterFunc(ctx, k.Abort)
	defer stop()
	defer func() { // the end of ctx looks like an abort; the caller gets the error of ctx instead
		var e *Error
		if errors.As(err, &e) && ctx.Err() != nil {
			e.Err, e.Timeout = ctx.Err(), isTimeout(ctx.Err())
			e.Aborted = !e.Timeout
		}
	}()
	r, err := k.Do(method, path, hdr, nil, Deadlines{})
	if err != nil {
		return 0, nil, err
	}
	defer r.Close()
	body, err = r.ReadAll(limit)
	return r.StatusCode(), body, err
}

// read returns the body of a GET as Get does, but any status other than 200 is an error, a
// *StatusError. If the engine refused the request because it re-forms, is paused, lacks a rank or
// was taken out of its group, this error wraps the reason. A GET concerns the whole engine,
// whatever rank t has, so a message about any rank counts.
func (c *Client) read(ctx context.Context, t *Target, path string, limit int, hdr ...Header) ([]byte, error) {
	status, body, err := c.Get(ctx, t, path, limit, hdr...)
	if err == nil && status != http.StatusOK {
		err = &StatusError{Target: t.ID, Path: path, Status: status, Why: ParseRefusal(status, body, t.Unranked())}
	}
	return body, err
}
