package engine

import (
	"context"
	"fmt"
	"net/http"
)

// Models reads GET /v1/models, bounded by ctx.
func Models(ctx context.Context, c *Client, t *Target) ([]Model, error) {
	status, body, err := c.Get(ctx, t, "/v1/models", answerLimit)
	if err != nil {
		return nil, err
	}
	if status != http.StatusOK {
		return nil, &StatusError{Target: t.ID, Path: "/v1/models", Status: status}
	}
	models, err := parseModels(body)
	if err != nil {
		return nil, fmt.Errorf("engine %s: GET /v1/models: %w", t.ID, err)
	}
	return models, nil
}
