package engine

import (
	"context"
	"fmt"
)

// Models reads GET /v1/models, bounded by ctx.
func Models(ctx context.Context, c *Client, t *Target) ([]Model, error) {
	body, err := c.read(ctx, t, "/v1/models", answerLimit)
	if err != nil {
		return nil, err
	}
	models, err := parseModels(body)
	if err != nil {
		return nil, fmt.Errorf("engine %s: GET /v1/models: %w", t.ID, err)
	}
	return models, nil
}
